"""The table of where a round's time goes, on a trace small enough to add up by hand."""

from __future__ import annotations

import pytest

from selfspec_cli.report.trace import shares


def annotation(name, ts, dur):
    return {"cat": "user_annotation", "name": f"selfspec.{name}", "ts": ts, "dur": dur}


def launch(correlation, ts):
    return {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": ts, "dur": 1, "args": {"correlation": correlation}}


def kernel(correlation, ts, dur):
    return {"cat": "kernel", "name": "gemm", "ts": ts, "dur": dur, "args": {"correlation": correlation}}


EVENTS = [
    annotation("verify", 0, 10), launch(1, 5), kernel(1, 100, 30), kernel(1, 130, 20),
    annotation("sample", 10, 30), launch(2, 12), kernel(2, 150, 5),
    annotation("draft", 20, 10), launch(3, 25), kernel(3, 160, 40),  # inside `sample`
    launch(4, 60), kernel(4, 190, 20),  # in no range, and beside the draft on another stream
]  # fmt: skip


def test_each_kernel_counts_where_it_was_launched_and_the_rest_is_idle():
    found, wall, rounds = shares(EVENTS)
    assert (wall, rounds) == (110, 1)
    assert {share.part: share.busy for share in found} == {
        "draft": 40, "other": 20, "sample": 5, "verify": 50, "idle": 110 - 50 - 5 - 50,
    }  # fmt: skip
    assert {share.part: share.launches for share in found}["verify"] == 1  # two kernels of one graph
    assert {share.part: share.kernels for share in found}["verify"] == {"gemm": (50, 2)}


def test_a_trace_without_ranges_is_refused():
    with pytest.raises(ValueError, match="no range of a verify pass"):
        shares([launch(1, 0), kernel(1, 1, 1)])
