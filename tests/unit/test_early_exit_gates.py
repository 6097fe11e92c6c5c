"""Gates against plain float64 formulas, at the edges where float32 and -inf go wrong, and their decisions."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from all_statistics import all_statistics, statistic
from hypothesis import example, given
from hypothesis import strategies as st
from refusals import said

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES, device_features, features, require_device
from selfspec_cli.early_exit.gates.base import Distribution, Rule
from selfspec_cli.early_exit.resolved import ResolvedSettings, warnings_for


def naive(name, row):
    """The formulas as the papers write them, in float64, over one row of logits."""
    top = max(row)
    weights = [math.exp(v - top) for v in row]
    total = sum(weights)
    p = [w / total for w in weights]
    entropy = -sum(q * math.log(q) for q in p if q > 0)
    ranked = [*sorted(p, reverse=True), 0.0]  # a vocabulary of one token has no second one
    return {
        "maxp": ranked[0],
        "varH": sum(q * (-math.log(q) - entropy) ** 2 for q in p if q > 0),
        "entropy": entropy,
        "margin": ranked[0] - ranked[1],
        "adaedl": 1 - math.sqrt(0.2 * entropy),
        "survival": 0.5 * ranked[0],
    }[name]


@pytest.fixture(params=[(2, 1), (1, 2), (5, 17), (3, 4000)], ids=str)
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


def test_low_precision_logits_are_computed_in_float32_and_left_as_they_were(logits):
    low = logits.bfloat16()
    before, draft = low.clone(), Distribution(low)
    torch.testing.assert_close(draft.logit, low.float().amax(1))
    torch.testing.assert_close(draft.logsumexp, draft.logit - draft.confidence.log(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(all_statistics(low), all_statistics(low.float()))
    assert torch.equal(low, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize("name", [n for n in GATES if n not in ("none", "auto")])
def test_nan_closes_the_gate_of_that_request_only(name, bad):
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    if bad == "all -inf":
        logits[0] = -math.inf
    else:
        logits[0, 4] = bad
    always = 0.0 if GATES[name].direction == "at_least" else 1e9
    rule = GATES[name].rule(-1e9 if name == "adaedl" else always)
    assert rule.is_open(statistic(rule.feature, logits, torch.ones(2))).tolist() == [False, True]


def test_a_gate_in_force_is_its_statistic_its_direction_and_its_threshold():
    assert GATES["maxp"].rule(0.2) == Rule("maxp", "at_least", 0.2)
    assert GATES["maxp"].rule(0) == Rule("maxp", "at_least", 0)
    assert GATES["varH"].rule() == Rule("varH", "at_most", 5.0)
    for name in ("none", "auto"):  # which compare nothing
        assert GATES[name].rule() == GATES[name].rule(0.5) == Rule(None, "at_least", -math.inf)
        assert GATES[name].rule().is_open(torch.full((3,), math.nan)).all()


def test_ranges_over_a_vocabulary():
    largest = math.log(2**20)  # where nobody says how many tokens there are
    for size, log in ((None, largest), (100, math.log(100)), (1, math.log(2))):
        assert GATES["entropy"].statistic_range(size) == (0.0, log if size != 1 else math.log(2))
        assert GATES["varH"].statistic_range(size) == (0.0, pytest.approx(log**2 / 4 + 1))
        assert GATES["adaedl"].statistic_range(size) == (pytest.approx(1 - math.sqrt(0.2 * log)), 1.0)
        for name in ("maxp", "margin", "survival"):
            assert GATES[name].statistic_range(size) == (0.0, 1.0)
    assert GATES["entropy"].statistic_range(2) == (0.0, math.log(2))


def test_a_row_may_have_a_threshold_of_its_own():
    values = torch.tensor([0.2, 0.5, 0.5])
    assert GATES["maxp"].rule(0.4).is_open(values, torch.tensor([0.1, 0.6, 0.5])).tolist() == [True, False, True]
    assert GATES["varH"].rule(0.4).is_open(values, torch.tensor([0.1, 0.6, 0.5])).tolist() == [False, True, True]


def test_a_right_device_expression_is_taken():
    assert replace(GATES["maxp"], device="tl.exp(logit) * second").device == "tl.exp(logit) * second"
    assert replace(GATES["survival"], device="previous - second").cumulative


def test_what_is_said_of_wrong_gates():
    refused = "gate 'maxp': its device expression "
    assert said(SettingsError, replace, GATES["maxp"], device="b + a + tl.exp(1)") == (
        f"{refused}'b + a + tl.exp(1)' uses a, b; allowed: confidence, second, entropy, varentropy, logit, logsumexp, "
        "previous, tl"
    )
    for text in ("1 +", "x = 1", "confidence)\n(second"):  # the last is two statements, once it is in parentheses
        found = said(SettingsError, replace, GATES["maxp"], device=text)
        assert found.startswith(f"{refused}{text!r} is no expression: ")
    assert said(SettingsError, replace, GATES["maxp"], device="previous") == (
        f"{refused[:-1]} uses previous, so it must be made cumulative=True"
    )
    assert said(SettingsError, replace, GATES["maxp"], key="taw") == (
        "gate 'maxp': threshold key 'taw' is not known; allowed: threshold, tau, tau_v; did you mean 'tau'?"
    )
    assert said(SettingsError, require_device, Rule("mine", "at_least", 0.5)) == (
        f"gate 'mine' has no device expression, so it runs on the CPU only; allowed on CUDA: none, "
        f"{', '.join(device_features())}"
    )
    require_device(Rule("maxp", "at_least", 0.5))
    require_device(Rule(None, "at_least", 0.5))


WITH_THRESHOLD = [name for name, gate in GATES.items() if gate.key is not None]


@example("maxp", 1.0, 2)
@given(st.sampled_from(WITH_THRESHOLD), st.floats(0, 1), st.integers(2, 200_000))
def test_a_warning_is_given_just_where_a_threshold_decides_nothing(name, threshold, vocab):
    gate = GATES[name]
    threshold = threshold if math.isfinite(gate.high) else 100 * threshold
    settings = ResolvedSettings.from_user({"gate": name, "threshold": threshold}, 8)
    low, high = gate.statistic_range(vocab)
    warnings = warnings_for(settings, vocab)
    if gate.direction == "at_least":
        always, never, edge = threshold <= low, threshold > high, threshold == high
    else:
        always, never, edge = threshold >= high, threshold < low, threshold == low
    assert len(warnings) == (always or never or edge)
    if warnings:
        words = "never closes" if always else "never opens (" if never else "never opens but for ties"
        assert words in warnings[0] and repr(name) in warnings[0] and f"{gate.key} = {threshold:g}" in warnings[0]
