"""Gates against plain float64 formulas, at the edges where float32 and -inf go wrong, and their decisions."""

import ast
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from all_statistics import all_statistics, statistic

from selfspec_cli.early_exit.calibrating import fit_calibration
from selfspec_cli.early_exit.calibration import Calibration
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES, device_features, features
from selfspec_cli.early_exit.gates.base import DEVICE_NAMES, Rule
from selfspec_cli.early_exit.gates.distribution import Distribution

RISING = Calibration("maxp", (0.0, 0.5, 1.0), (0.1, 0.3, 0.9))


def naive(name, row):
    """The formulas as the papers write them, in float64, over one row of logits."""
    top = max(row)
    weights = [math.exp(v - top) for v in row]
    total = sum(weights)
    p = [w / total for w in weights]
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


@pytest.mark.parametrize("name", features())
def test_against_naive_formulas(name, logits):
    got = statistic(name, logits, torch.full((len(logits),), 0.5))
    want = [naive(name, row) for row in logits.double().tolist()]
    assert got.dtype == torch.float32
    assert got.shape == (len(logits),)
    np.testing.assert_allclose(got.numpy(), want, rtol=2e-4, atol=2e-5)


def test_a_uniform_and_a_one_hot_distribution():
    uniform, one_hot = torch.zeros(1, 8), torch.full((1, 8), -math.inf)
    one_hot[0, 3] = 5.0
    for row, maxp, entropy, margin in ((uniform, 1 / 8, math.log(8), 0), (one_hot, 1, 0, 1)):
        assert statistic("maxp", row).item() == pytest.approx(maxp)
        assert statistic("entropy", row).item() == pytest.approx(entropy, abs=1e-6)
        assert statistic("varH", row).item() == pytest.approx(0, abs=1e-6)
        assert statistic("margin", row).item() == pytest.approx(margin, abs=1e-6)
        assert statistic("adaedl", row).item() == pytest.approx(1 - math.sqrt(0.2 * entropy), abs=1e-3)


def test_a_vocabulary_of_one_token():
    certain = {"maxp": 1, "varH": 0, "entropy": 0, "margin": 1, "adaedl": 1, "survival": 1}
    assert all_statistics(torch.zeros(2, 1)).tolist() == [[certain[name] for name in features()]] * 2


def test_the_logits_own_size(logits):
    draft = Distribution(logits.bfloat16())
    torch.testing.assert_close(draft.logit, logits.bfloat16().float().amax(1))
    torch.testing.assert_close(draft.logsumexp, draft.logit - draft.confidence.log(), atol=1e-4, rtol=1e-4)


def test_low_precision_logits_are_computed_in_float32(logits):
    low = logits.bfloat16()
    for name in features():
        torch.testing.assert_close(statistic(name, low), statistic(name, low.float()))


def test_logits_are_left_as_they_were(logits):
    before = logits.clone()
    all_statistics(logits)
    assert torch.equal(logits, before)


def test_some_rows_of_a_distribution(logits):
    draft = Distribution(logits)
    for name in features():
        part = GATES[name].statistic(draft.rows(slice(1, 3)), 1.0)
        assert torch.equal(part, GATES[name].statistic(draft, 1.0)[1:3])


@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize("name", [n for n in GATES if n not in ("none", "auto")])
def test_nan_closes_the_gate_of_that_request_only(name, bad):
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    if bad == "all -inf":
        logits[0] = -math.inf
    else:
        logits[0, 4] = bad
    always = 0.0 if GATES[name].direction == "at_least" else 1e9
    rule = GATES[name].rule(-1e9 if name == "adaedl" else always, RISING)
    assert rule.is_open(statistic(rule.feature, logits, torch.ones(2))).tolist() == [False, True]


def test_survival_multiplies_up():
    generator = torch.Generator().manual_seed(1)
    steps = [torch.randn(4, 11, generator=generator) for _ in range(3)]
    alive = 1.0
    for logits in steps:
        alive = statistic("survival", logits, alive)
    want = torch.stack([logits.softmax(-1).amax(-1) for logits in steps]).prod(0)
    torch.testing.assert_close(alive, want)


def test_gates_none_and_auto_compare_nothing():
    for name in ("none", "auto"):
        rule = GATES[name].rule()
        assert rule.feature is None
        assert rule.is_open(torch.full((3,), math.nan)).all()


def test_an_unknown_gate_is_answered_with_the_nearest():
    with pytest.raises(SettingsError, match=r"none, adaedl.*did you mean 'maxp'"):
        GATES["maxq"]


def test_the_registry_holds_every_module_of_the_folder():
    built_in = ["none", "adaedl", "auto", "calibrated", "entropy", "margin", "maxp", "survival", "varH"]
    assert list(GATES)[: len(built_in)] == built_in
    assert features() == tuple(name for name in GATES if name not in ("none", "auto", "calibrated"))
    assert len({gate.colour for gate in GATES.values()}) == len(GATES)


@pytest.mark.parametrize("name", device_features())
def test_a_device_expression_uses_the_documented_names_alone(name):
    used = {node.id for node in ast.walk(ast.parse(GATES[name].device)) if isinstance(node, ast.Name)}
    assert used <= {*DEVICE_NAMES, "tl"}


# ---- calibration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", features())
@pytest.mark.parametrize("tau", [0.0, 0.1, 0.25, 0.5, 0.85, 0.9, 1.0])
def test_a_calibrated_gate_is_a_threshold_on_its_feature(feature, tau):
    ps = (0.1, 0.1, 0.5, 0.9)
    rising = GATES[feature].direction == "at_least"
    calibration = Calibration(feature, (0.1, 0.3, 0.5, 0.7), ps if rising else ps[::-1])
    rule = GATES["calibrated"].rule(tau, calibration)
    values = torch.linspace(0, 1, 98)  # no knot and no crossing among them, where rounding decides
    assert rule.feature == feature
    assert torch.equal(rule.is_open(values), calibration.probability(values) >= tau)


@pytest.mark.parametrize(("feature", "sign"), [("maxp", 1), ("entropy", -1)])
def test_a_calibration_finds_the_acceptance_it_was_drawn_from(feature, sign):
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(20_000, generator=generator)
    truth = 0.1 + 0.8 * (x**2 if sign > 0 else 1 - x**2)
    fitted = fit_calibration(feature, x, torch.rand(20_000, generator=generator) < truth)
    assert list(fitted.ps) == sorted(fitted.ps, reverse=sign < 0)
    error = fitted.probability(x) - truth
    assert error.abs().mean() < 0.02


def test_a_calibration_pools_violators_and_drops_nan():
    values = torch.tensor([0.1, 0.2, 0.3, math.nan])
    fitted = fit_calibration("maxp", values, torch.tensor([1, 0, 1, 0]), max_knots=3)
    assert fitted.ps == pytest.approx((0.5, 0.5, 1.0))
    with pytest.raises(SettingsError, match="nothing to calibrate"):
        fit_calibration("maxp", values[3:], torch.tensor([1]))


def test_a_calibration_is_weighted_by_how_many_tokens_a_bin_holds():
    """Three tokens of one value and one of another: the mean over the four, not over the two values."""
    fitted = fit_calibration("maxp", torch.tensor([0.1, 0.1, 0.1, 0.9]), torch.tensor([1, 1, 0, 0]), max_knots=4)
    assert fitted.probability(torch.tensor([0.1, 0.9])).tolist() == pytest.approx([0.5, 0.5])


def test_a_calibration_of_repeated_values_has_ascending_knots():
    fitted = fit_calibration("maxp", torch.ones(100), torch.arange(100) % 4 == 0)
    assert fitted.xs == (1.0,)
    assert fitted.ps == pytest.approx((0.25,))


def test_a_gate_in_force_is_its_statistic_its_direction_and_its_threshold():
    assert GATES["maxp"].rule(0.2) == Rule("maxp", "at_least", 0.2)
    assert GATES["maxp"].rule(0) == Rule("maxp", "at_least", 0)
    assert GATES["varH"].rule() == Rule("varH", "at_most", 5.0)
    assert GATES["none"].rule() == GATES["none"].rule(0.5) == Rule(None, "at_least", -math.inf)
    assert GATES["calibrated"].rule(None, RISING) == GATES["calibrated"].rule(0.5, RISING)
    assert GATES["calibrated"].rule(0.6, RISING).threshold == pytest.approx(0.75)
    assert GATES["calibrated"].rule(0.05, RISING) == Rule("maxp", "at_least", -math.inf)
    assert GATES["calibrated"].rule(0.95, RISING) == Rule("maxp", "at_least", math.inf)
    falling = Calibration("entropy", (0.0, 2.0), (0.9, 0.1))
    assert GATES["calibrated"].rule(0.05, falling) == Rule("entropy", "at_most", math.inf)
    assert GATES["calibrated"].rule(0.95, falling) == Rule("entropy", "at_most", -math.inf)
    assert GATES["calibrated"].rule(0.5, falling).threshold == pytest.approx(1.0)


def test_ranges_over_a_vocabulary():
    largest = math.log(2**20)  # where nobody says how many tokens there are
    for size, log in ((None, largest), (100, math.log(100)), (1, math.log(2))):
        assert GATES["entropy"].statistic_range(size) == (0.0, log if size != 1 else GATES["entropy"].range(1)[1])
        assert GATES["varH"].statistic_range(size) == (0.0, pytest.approx(log**2 / 4 + 1))
        assert GATES["adaedl"].statistic_range(size) == (pytest.approx(1 - math.sqrt(0.2 * log)), 1.0)
        for name in ("maxp", "margin", "survival"):
            assert GATES[name].statistic_range(size) == (0.0, 1.0)
    assert GATES["entropy"].statistic_range(2) == (0.0, math.log(2))
    assert GATES["calibrated"].statistic_range() == (0.0, 1.0)
    assert GATES["calibrated"].statistic_range(5, RISING) == (0.1, 0.9)


def test_what_gates_may_be_asked_for():
    """Thresholds that are allowed, defaults and keys: what users rely on without naming it."""
    tau = ("tau", "at_least", 0.0, 1.0)
    assert {name: (gate.key, gate.direction, gate.low, gate.high, gate.default) for name, gate in GATES.items()} == {
        "none": (None, "at_least", 0.0, 0.0, None),
        "auto": (None, "at_least", 0.0, 0.0, None),
        "maxp": (*tau, 0.35),
        "margin": (*tau, 0.3),
        "survival": (*tau, 0.3),
        "adaedl": (*tau, 0.4),
        "calibrated": (*tau, 0.5),
        "varH": ("tau_v", "at_most", 0.0, math.inf, 5.0),
        "entropy": ("threshold", "at_most", 0.0, math.inf, 2.0),
    }
    assert [name for name, gate in GATES.items() if gate.cumulative] == ["survival"]
    assert [name for name, gate in GATES.items() if gate.needs_calibration] == ["calibrated"]


def test_a_map_has_32_knots_at_most_unless_more_are_asked_for():
    rates = torch.arange(64).repeat_interleave(64)
    values, hits = rates.float() / 64, torch.arange(64).repeat(64) < rates
    assert len(fit_calibration("maxp", values, hits).xs) == 32
    assert len(fit_calibration("maxp", values, hits, max_knots=64).xs) == 64
    assert len(fit_calibration("entropy", -values, hits, max_knots=3).ps) == 3


def test_a_row_may_have_a_threshold_of_its_own():
    values = torch.tensor([0.2, 0.5, 0.5])
    assert GATES["maxp"].rule(0.4).is_open(values, torch.tensor([0.1, 0.6, 0.5])).tolist() == [True, False, True]
    assert GATES["varH"].rule(0.4).is_open(values, torch.tensor([0.1, 0.6, 0.5])).tolist() == [False, True, True]


def test_a_right_device_expression_is_taken():
    assert replace(GATES["maxp"], device="tl.exp(logit) * second").device == "tl.exp(logit) * second"
    assert replace(GATES["survival"], device="previous - second").cumulative
    with pytest.raises(SettingsError, match="is no expression"):
        replace(GATES["maxp"], device="confidence)\n(second")  # two statements, once they stand in parentheses
