"""Records for any text and any numbers: points come back from their files, and tables from the points."""

import csv
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from points import ARM, BASELINE, point
from properties import settings as _profile  # noqa: F401 (loads the profile)

from selfspec_cli.early_exit.counters import DraftCounters, VerifyCounts
from selfspec_cli.record import columns, tables
from selfspec_cli.record.columns import Summary
from selfspec_cli.record.point import Comparison, Repeat, from_json, to_json
from selfspec_cli.record.statistics import RequestTimes

finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(1e-3, 1e6)
# Python reads a file name that is not UTF-8 with a lone surrogate for each byte that it cannot decode.
letters = st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("\n\t\r,\"'\x85\u2028\udcff"))
words = st.text(letters, max_size=8)
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), finite, words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=6,
)
maybe = st.none() | positive
speeds = st.lists(positive, max_size=3).map(tuple)
compared = st.builds(Comparison, words, words, st.booleans(), speeds, positive, maybe, maybe, maybe)
microseconds = st.integers(0, 10**12).map(lambda number: number / 1_000_000)


@st.composite
def repeats(draw):
    """What one timed repeat may have been; times are whole microseconds, as files keep them."""
    request = st.builds(
        RequestTimes, microseconds, st.lists(microseconds, min_size=1, max_size=3).map(tuple), st.integers(1, 9)
    )
    at = draw(st.lists(st.integers(0, 50), min_size=3, max_size=3))
    verified = VerifyCounts(draw(st.integers(0, 50)), draw(st.integers(0, 200)), sum(at), at)
    own = DraftCounters(3).snapshot() | {"drafted": draw(st.integers(0, 200))}
    counted = draw(st.sampled_from([(None, None), (verified, None), (verified, own)]))
    return Repeat(draw(positive), tuple(draw(st.lists(request, min_size=1, max_size=3))), *counted)


SECTIONS = st.fixed_dictionaries(
    {
        "key": st.text("0123456789abcdef", min_size=12, max_size=12),
        "time": words,
        "seconds": maybe,
        "start_seconds": maybe,
        "device": words,
        "command": st.none() | st.lists(words, max_size=3),
        "config": st.none() | st.dictionaries(words, plain),
        "digests": st.dictionaries(words, words, max_size=2),
        "compared_with": st.none() | compared,
        "engine": st.dictionaries(words, plain, max_size=2),
        "perplexity": maybe,
        "outputs": st.lists(words, max_size=2).map(tuple),
        "repeats": st.lists(repeats(), max_size=3).map(tuple),
    }
)
FAILED = st.fixed_dictionaries({"status": st.just("failed"), "reason": words})


@st.composite
def points(draw):
    """Any point; those of a drafting arm have counts, and may be compared with a baseline."""
    arm = draw(st.sampled_from([ARM, BASELINE])) | {"model": draw(words)}
    return point(arm=arm, **draw(SECTIONS) | draw(st.just({}) | FAILED))


@pytest.mark.slow
@given(points())
def test_a_point_comes_back_from_its_text(made):
    text = to_json(made)
    assert from_json(text) == made
    assert from_json(to_json(from_json(text))) == made


@pytest.mark.slow
@given(points())
def test_a_row_has_a_cell_for_each_column_and_nothing_that_was_not_measured(made):
    row = tables.row(made)
    names, cells = csv.reader(columns.text(Summary, [row]).splitlines())
    assert names == columns.header(Summary) and len(cells) == len(fields(Summary))
    shown = dict(zip(columns.header(Summary), cells, strict=True))
    assert (shown["point"], shown["key"], shown["run_id"]) == (made.id, made.key, made.run_id)
    if not made.ok or not made.repeats:
        assert shown["tok_s_median"] == shown["accept_rate"] == shown["mean_accepted_len"] == ""
    else:
        assert row.tok_s_min <= row.tok_s_median <= row.tok_s_max
        assert float(shown["tok_s_median"]) == pytest.approx(row.tok_s_median, rel=1e-5)
    kept = tables.accept_row(made)
    verified = [repeat.verified for repeat in made.repeats if repeat.verified is not None]
    assert (kept is None) == (not verified)
    if kept is not None:
        assert kept.accepted == sum(part.accepted for part in verified) == sum(map(int, kept.accepted_at.split()))
        assert kept.rounds == sum(part.rounds for part in verified)
