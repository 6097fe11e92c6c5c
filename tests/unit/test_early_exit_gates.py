"""Gates against plain float64 formulas, at the edges where float32 and -inf go wrong, and their decisions."""

import math

import numpy as np
import pytest
import torch

from selfspec_cli.early_exit import gates
from selfspec_cli.early_exit.calibration import fit_calibration
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gate_rules import FEATURES, GATE_RULES, Calibration, statistic_range

RISING = Calibration("maxp", (0.0, 0.5, 1.0), (0.1, 0.3, 0.9))


def naive(name, row):
    """The formulas as the papers write them, in float64, over one row of logits."""
    weights = [math.exp(v - max(row)) for v in row]
    p = [w / sum(weights) for w in weights]
    entropy = -sum(q * math.log(q) for q in p if q > 0)
    ranked = sorted(p, reverse=True)
    return {
        "maxp": ranked[0],
        "varH": sum(q * (-math.log(q) - entropy) ** 2 for q in p if q > 0),
        "entropy": entropy,
        "margin": ranked[0] - ranked[1],
        "adaedl": 1 - math.sqrt(0.2 * entropy),
        "survival": 0.5 * ranked[0],
    }[name]


@pytest.fixture(params=[(1, 2), (5, 17), (3, 4000)], ids=str)
def logits(request):
    n, v = request.param
    generator = torch.Generator().manual_seed(v)
    rows = torch.randn(n, v, generator=generator) * torch.logspace(-1, 1.5, n)[:, None]
    rows[0, 0] = -math.inf if v > 2 else rows[0, 0]
    return rows


@pytest.mark.parametrize("name", FEATURES)
def test_against_naive_formulas(name, logits):
    half = torch.full((len(logits),), 0.5)
    got = gates.statistic(name, logits, half)
    want = [naive(name, row) for row in logits.double().tolist()]
    assert got.dtype == torch.float32
    assert got.shape == (len(logits),)
    np.testing.assert_allclose(got.numpy(), want, rtol=2e-4, atol=2e-5)


def test_all_statistics_agree_with_each(logits):
    half = torch.full((len(logits),), 0.5)
    table = gates.all_statistics(logits, half)
    for column, name in enumerate(FEATURES):
        torch.testing.assert_close(table[:, column], gates.statistic(name, logits, half), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FEATURES)
def test_statistics_stay_in_their_range(name, logits):
    least, greatest = statistic_range(name, logits.shape[1])
    got = gates.statistic(name, logits)
    assert (got >= least - 1e-4).all()
    assert (got <= greatest + 1e-4).all()


def test_uniform_and_one_hot():
    uniform, one_hot = torch.zeros(1, 8), torch.full((1, 8), -math.inf)
    one_hot[0, 3] = 5.0
    for row, maxp, entropy, margin in ((uniform, 1 / 8, math.log(8), 0), (one_hot, 1, 0, 1)):
        assert gates.max_prob(row).item() == pytest.approx(maxp)
        assert gates.entropy(row).item() == pytest.approx(entropy, abs=1e-6)
        assert gates.varentropy(row).item() == pytest.approx(0, abs=1e-6)
        assert gates.top2_margin(row).item() == pytest.approx(margin, abs=1e-6)
        assert gates.adaedl_bound(row).item() == pytest.approx(1 - math.sqrt(0.2 * entropy), abs=1e-3)


def test_adaedl_gamma_is_a_parameter():
    assert gates.adaedl_bound(torch.zeros(1, 8), gamma=0.05).item() == pytest.approx(1 - math.sqrt(0.05 * math.log(8)))


def test_a_vocabulary_of_one_token():
    assert gates.all_statistics(torch.zeros(2, 1)).tolist() == [[1, 0, 0, 1, 1, 1]] * 2


def test_low_precision_logits_are_computed_in_float32(logits):
    low = logits.bfloat16()
    for name in FEATURES:
        torch.testing.assert_close(gates.statistic(name, low), gates.statistic(name, low.float()))


def test_logits_are_left_as_they_were(logits):
    before = logits.clone()
    for name in FEATURES:
        gates.statistic(name, logits)
    gates.all_statistics(logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize("name", [n for n in GATE_RULES if n != "none"])
def test_nan_closes_the_gate_of_that_request_only(name, bad):
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    if bad == "all -inf":
        logits[0] = -math.inf
    else:
        logits[0, 4] = bad
    statistic = gates.statistic(name, logits, torch.ones(2), RISING)
    always = 0.0 if GATE_RULES[name].direction == "at_least" else 1e9
    threshold = -1e9 if name == "adaedl" else always
    assert gates.is_open(name, statistic, threshold).tolist() == [False, True]


def test_survival_multiplies_up():
    generator = torch.Generator().manual_seed(1)
    steps = [torch.randn(4, 11, generator=generator) for _ in range(3)]
    alive = None
    for logits in steps:
        alive = gates.statistic("survival", logits, alive)
    want = torch.stack([logits.softmax(-1).amax(-1) for logits in steps]).prod(0)
    torch.testing.assert_close(alive, want)


def test_directions():
    values = torch.tensor([0.2, 0.5, 0.8])
    for name, rule in GATE_RULES.items():
        got = gates.is_open(name, values, 0.5).tolist()
        if name == "none":
            assert got == [True] * 3
        else:
            assert got == ([False, True, True] if rule.direction == "at_least" else [True, True, False])


def test_thresholds_may_be_tensors_or_defaults():
    values = torch.tensor([0.2, 0.8])
    assert gates.is_open("maxp", values, torch.tensor([0.1, 0.9])).tolist() == [True, False]
    assert gates.is_open("maxp", values, torch.tensor(0.5)).tolist() == [False, True]
    assert gates.is_open("maxp", values, None).tolist() == [False, True]


def test_tau_zero_is_always_open(logits):
    assert gates.is_open("maxp", gates.max_prob(logits), 0.0).all()


def test_gate_none_reads_nothing():
    statistic = gates.statistic("none", torch.full((3, 5), math.nan))
    assert gates.is_open("none", statistic, None).all()


def test_unknown_gate_lists_the_known():
    for call in (lambda: gates.statistic("maxq", torch.zeros(1, 2)), lambda: gates.is_open("maxq", torch.ones(1), 0)):
        with pytest.raises(SettingsError, match=r"none, maxp.*did you mean 'maxp'"):
            call()


def test_registry_carries_the_rules():
    assert list(gates.GATES) == ["none", "maxp", "varH", "entropy", "margin", "adaedl", "survival", "calibrated"]
    assert gates.GATES["varH"].key == "tau_v"
    assert gates.GATES["maxp"].function is gates.max_prob


def test_calibrated_is_numpys_interpolation():
    feature = torch.linspace(-0.5, 1.5, 41)
    want = np.interp(feature.numpy(), RISING.xs, RISING.ps)
    np.testing.assert_allclose(gates.calibrated(feature, RISING).numpy(), want, atol=1e-6)
    one = Calibration("maxp", (0.3,), (0.7,))
    assert gates.calibrated(torch.tensor([0.0, 1.0]), one).tolist() == pytest.approx([0.7, 0.7])


def test_calibrated_needs_its_map():
    with pytest.raises(SettingsError, match="calibration"):
        gates.statistic("calibrated", torch.zeros(1, 2))


@pytest.mark.parametrize(("feature", "sign"), [("maxp", 1), ("entropy", -1)])
def test_a_calibration_finds_the_acceptance_it_was_drawn_from(feature, sign):
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(20_000, generator=generator)
    truth = 0.1 + 0.8 * (x**2 if sign > 0 else 1 - x**2)
    fitted = fit_calibration(feature, x, torch.rand(20_000, generator=generator) < truth)
    assert list(fitted.ps) == sorted(fitted.ps, reverse=sign < 0)
    error = gates.calibrated(x, fitted) - truth
    assert error.abs().mean() < 0.02


def test_calibration_pools_violators_and_drops_nan():
    values = torch.tensor([0.1, 0.2, 0.3, math.nan])
    fitted = fit_calibration("maxp", values, torch.tensor([1, 0, 1, 0]), max_knots=3)
    assert fitted.ps == pytest.approx((0.5, 0.5, 1.0))
    with pytest.raises(SettingsError, match="nothing to calibrate"):
        fit_calibration("maxp", values[3:], torch.tensor([1]))


def test_calibration_of_repeated_values_has_ascending_knots():
    fitted = fit_calibration("maxp", torch.ones(100), torch.arange(100) % 4 == 0)
    assert fitted.xs == (1.0,)
    assert fitted.ps == pytest.approx((0.25,))
