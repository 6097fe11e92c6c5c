"""Gates and thresholds for any logits and numbers."""

import math

import numpy as np
import torch
from all_statistics import all_statistics
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from selfspec_cli.early_exit.gates import GATES, features
from selfspec_cli.early_exit.resolved import ResolvedSettings, warnings_for

WITH_THRESHOLD = [name for name, gate in GATES.items() if gate.key is not None]
numbers = st.one_of(st.floats(), st.integers(), st.booleans(), st.text(max_size=3), st.none())


@st.composite
def logits(draw, low=-1e4, high=1e4):
    """[n, V] float32, -inf among them, with a finite one in each row."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 9)))
    values = st.one_of(st.floats(low, high, width=32), st.floats(-3, 3, width=32), st.just(-math.inf))
    rows = torch.from_numpy(draw(arrays(np.float32, shape, elements=values)))
    rows[:, draw(st.integers(0, shape[1] - 1))] = draw(st.floats(-3, 3, width=32))
    return rows


@given(logits())
def test_statistics_are_numbers_in_their_range(rows):
    found = all_statistics(rows)
    for column, name in enumerate(features()):
        low, high = GATES[name].statistic_range(rows.shape[1])
        values = found[:, column]
        assert ((values >= low - 1e-4) & (values <= high + 1e-4)).all(), name


@given(st.sampled_from(WITH_THRESHOLD), st.floats(0, 1), st.floats(0, 1), st.lists(st.floats(width=32), min_size=1))
def test_a_stricter_threshold_opens_no_gate(name, one, other, values):
    at_least = GATES[name].direction == "at_least"
    loose, strict = sorted((one, other), reverse=not at_least)
    statistics = torch.tensor(values)
    opened = GATES[name].rule(loose).is_open(statistics)
    assert not (GATES[name].rule(strict).is_open(statistics) & ~opened).any()
    assert not opened[statistics.isnan()].any()
    limit = torch.tensor(loose)
    assert opened.tolist() == [
        not math.isnan(value) and (value >= limit if at_least else value <= limit) for value in statistics.tolist()
    ]


# ---- thresholds ------------------------------------------------------------------------------------------------------


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
        said = "never closes" if always else "never opens (" if never else "never opens but for ties"
        assert said in warnings[0] and repr(name) in warnings[0] and f"{gate.key} = {threshold:g}" in warnings[0]
