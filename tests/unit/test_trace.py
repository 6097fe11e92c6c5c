"""Where a run's time goes, on traces small enough to add up by hand."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from selfspec_cli.record import archive
from selfspec_cli.report import trace
from selfspec_cli.report.trace import breakdown, draft_step


def annotation(name, ts, dur, tid=1):
    return {"ph": "X", "cat": "user_annotation", "name": f"selfspec.{name}", "ts": ts, "dur": dur, "tid": tid}


def launch(correlation, ts, name="cudaLaunchKernel"):
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": ts, "dur": 1, "args": {"correlation": correlation}}


def kernel(correlation, ts, dur, name="nvjet_tst"):
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": args}


def operator(name, ts, dur, tid=1):
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": tid}


def microseconds(found):
    return {part: round(1e6 * seconds) for part, seconds in found.seconds.items()}


GPU = [
    annotation("schedule", 0, 3),
    annotation("verify", 3, 7),
    launch(1, 5, "cudaGraphLaunch"),
    kernel(1, 20, 30),
    kernel(1, 50, 20),
    annotation("sample", 10, 30),
    launch(2, 12),
    kernel(2, 70, 5),
    annotation("draft", 20, 10),
    launch(3, 25),
    kernel(3, 75, 40, "_begin_round"),  # inside `sample`
    launch(4, 60),
    kernel(4, 105, 20, "memcpy"),  # in no range, and ten beside the draft on another stream
    annotation("schedule", 130, 10),
]


def test_on_a_gpu_each_moment_is_that_of_the_kernel_or_else_of_the_host():
    found = breakdown(GPU, [], 150e-6)
    assert microseconds(found) == {
        "verify": 50,
        "sampler": 5,
        "draft": 40,
        "other": 10,
        "scheduler": 3 + 10,
        "host": 17,
        "idle": 5 + 10,
    }
    assert sum(microseconds(found).values()) == 150
    assert found.gpu and found.rounds == 1
    verify = found.kernels[0]
    assert (verify.name, verify.part, round(1e6 * verify.seconds), verify.calls) == ("nvjet_tst", "verify", 50, 2)


EAGER = [
    annotation("verify", 0, 1),
    annotation("draft", 10, 200),
    *[
        event
        for step in range(3)
        for event in (
            launch(10 * step + 1, 20 + 40 * step),
            kernel(10 * step + 1, 1000 + 100 * step, 2, "_slots"),
            annotation("trunk", 21 + 40 * step, 10),
            launch(10 * step + 2, 22 + 40 * step),
            kernel(10 * step + 2, 1010 + 100 * step, 20, "nvjet_a"),
            launch(10 * step + 3, 25 + 40 * step),
            kernel(10 * step + 3, 1030 + 100 * step, 5, "norm"),
            annotation("head", 32 + 40 * step, 5),
            launch(10 * step + 4, 33 + 40 * step),
            kernel(10 * step + 4, 1040 + 100 * step, 9, "nvjet_a"),
            annotation("gate", 40 + 40 * step, 5),
            launch(10 * step + 5, 41 + 40 * step),
            kernel(10 * step + 5, 1050 + 100 * step, 1, "_end_step"),
        )
    ],
]


def test_the_kernels_of_a_draft_step_are_learnt_where_they_are_launched_one_by_one():
    assert draft_step(EAGER) == [
        ("_slots", "draft"),
        ("nvjet_a", "trunk"),
        ("norm", "trunk"),
        ("nvjet_a", "head"),
        ("_end_step", "gate"),
    ]


def test_a_kernel_whose_launch_the_profiler_does_not_record_is_known_by_its_name():
    whole = [event for event in EAGER if event.get("name") != "norm"]
    whole = [
        event | {"name": "draft_trunk"}
        if event.get("args", {}).get("correlation", 0) % 10 == 2 and event["cat"] == "kernel"
        else event
        for event in whole
    ]
    unseen = [event for event in whole if event["cat"] != "cuda_runtime" or event["args"]["correlation"] % 10 != 2]
    assert (
        draft_step(unseen)
        == draft_step(whole)
        == [
            ("_slots", "draft"),
            ("draft_trunk", "trunk"),
            ("nvjet_a", "head"),
            ("_end_step", "gate"),
        ]
    )


def test_a_loop_of_which_no_step_is_known_is_doubted():
    events = [event for number in range(2) for event in round_with_one_pass_of_a_loop(number, "last", False)]
    assert any("not known" in doubt for doubt in breakdown(events, [], 600e-6, step=[], steps=4).doubts)
    assert not breakdown(events, [], 600e-6, step=[], steps=None).doubts


def looped(correlation, unknown=False):
    """Two steps of a loop inside a graph, whose launch the profiler may know nothing of."""
    names = [("_slots", 2), ("nvjet_a", 20), ("norm", 5), ("nvjet_a", 9), ("_end_step", 1), ("set_condition", 3)]
    at, made = 100.0, []
    for name, dur in names * 2:
        made.append(kernel(99 if unknown else correlation, at, dur, name))
        at += dur
    return made


@pytest.mark.parametrize("unknown", [False, True])
def test_kernels_of_a_captured_loop_are_told_by_their_order(unknown):
    events = [
        annotation("verify", 0, 10),
        launch(1, 5),
        kernel(1, 50, 50, "nvjet_b"),
        annotation("draft", 20, 10),
        launch(2, 22, "cudaGraphLaunch"),
        *looped(2, unknown),
    ]
    found = breakdown(events, [], 180e-6, step=draft_step(EAGER), weights={"full": [100], "draft": [40, 60]})
    seconds = microseconds(found)
    assert {part: seconds[part] for part in ("trunk", "head", "gate", "verify")} == {
        "trunk": 50,
        "head": 18,
        "gate": 2,
        "verify": 50,
    }
    # The kernel that sets the loop's condition is in no step.
    assert seconds["other" if unknown else "draft"] == (6 + (0 if unknown else 4)) and sum(seconds.values()) == 180
    read = {(one.name, one.part): one.bytes for one in found.kernels}
    assert read[("nvjet_a", "trunk")] == 2 * 40 and read[("nvjet_a", "head")] == 2 * 60
    assert read[("nvjet_b", "verify")] == 100 and read[("norm", "trunk")] is None
    assert found.doubts == []


def round_with_one_pass_of_a_loop(number, seen, unknown):
    """300 us of a GPU: a pass of 37 us beside a rest of 50 in the launch of a loop, where only the last pass is seen,
    or the first; the host is at scheduling then. In front of that launch the GPU waits 60 us for the host."""
    at, own = 300.0 * number, 10 * number
    begin, rest = (165, 115) if seen == "last" else (115, 155)
    return [
        annotation("verify", at, 10),
        launch(own + 1, at + 1),
        kernel(own + 1, at, 50, "nvjet_b"),
        annotation("draft", at + 20, 80),
        launch(own + 2, at + 21),
        kernel(own + 2, at + 50, 2, "_begin_round"),
        launch(own + 3, at + 90, "cudaGraphLaunch"),
        kernel(own + 3, at + 112, 3, "set_condition"),
        *[one | {"ts": one["ts"] + at + begin - 100} for one in looped(own + 3, unknown)[:6]],
        annotation("schedule", at + rest, 50),
        annotation("sample", at + 101, 3),
        launch(own + 4, at + 102),
        kernel(own + 4, at + 205, 2, "_counts"),
    ]


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize("seen", ["last", "first"])
@pytest.mark.parametrize("steps", [2, 3, 4, 9])
def test_passes_of_a_loop_that_the_profiler_does_not_see_take_the_rest_beside_the_one_it_sees(seen, steps, unknown):
    events = [event for number in range(2) for event in round_with_one_pass_of_a_loop(number, seen, unknown)]
    found = breakdown(events, [], 600e-6, step=draft_step(EAGER), steps=steps)
    extra = min(37 * (steps - 2), 2 * 50)
    share = {"trunk": 25, "head": 9, "gate": 1}
    assert {part: 1e6 * found.seconds[part] for part in share} == pytest.approx(
        {part: time * (2 + extra / 37) for part, time in share.items()}, abs=1
    )
    # The host was at scheduling in all of the rest, and the GPU at drafting.
    assert 1e6 * found.seconds.get("scheduler", 0) == pytest.approx(max(0, 100 - extra), abs=1)
    # Nothing of this is where the GPU waits for the host in front of the loop.
    assert not [one for one in found.timeline if one[2] in share and one[1] % 300 and one[1] % 300 < 112]
    every_moment_is_counted_once(found, 0, 600)
    # Kernels of a step count once for each step that was made, and all others as often as the trace has them.
    kernels = {(one.name, one.part): (one.calls, 1e6 * one.seconds) for one in found.kernels}
    assert kernels["nvjet_a", "trunk"] == (steps, pytest.approx(20 * steps))
    assert kernels["nvjet_b", "verify"] == (2, pytest.approx(100))
    assert bool(found.doubts) == (steps > 2)
    assert any("seems idle" in doubt for doubt in found.doubts) == (steps == 9)


def every_moment_is_counted_once(found, begin, end):
    times = [one[:2] for one in found.timeline]
    assert times[0][0] == begin and times[-1][1] == end
    assert all(one[1] == following[0] for one, following in pairwise(times))
    assert 1e6 * sum(found.seconds.values()) == pytest.approx(end - begin)


def test_bytes_are_not_known_where_products_and_weights_do_not_pair():
    found = breakdown(GPU, [], 150e-6, weights={"full": [1, 2, 3]})
    assert all(one.bytes is None for one in found.kernels)
    assert found.doubts and "2 products" in found.doubts[0]


def test_products_are_told_from_other_kernels_in_a_trace_of_an_h200():
    """Four products in each of 32 layers, whose lm_head counted as sampling then; three draft steps of 8 layers and a
    head, on a kernel of ours."""
    file = Path(__file__).parents[2] / "results" / "published" / "gpu.jsonl.xz" / "trace_batch1.json"
    products = [
        {
            part["part"]: sum(one["times"] for one in part["kernels"] if trace.is_product(one["name"]))
            for part in arm["parts"]
            if part["part"] != "idle"
        }
        for arm in json.loads(archive.read_text(file))
    ]
    plain, drafting, unrolled = products
    assert plain["verify"] == pytest.approx(4 * 32, rel=0.02) and plain["sample"] == pytest.approx(1, abs=0.02)
    assert drafting["other"] == unrolled["draft"] == 3 * (4 * 8 + 1)


CPU = [
    annotation("step", 0, 100),
    annotation("schedule", 5, 10),
    annotation("verify", 15, 40),
    operator("aten::linear", 16, 30),
    operator("aten::addmm", 20, 20),
    annotation("sample", 55, 30),
    annotation("draft", 60, 20),
    annotation("gate", 62, 16),
    annotation("trunk", 63, 7),
    annotation("head", 70, 5),
    annotation("detokenise", 90, 6),
    operator("aten::mm", 17, 5, tid=2),
]


def test_on_the_cpu_each_moment_is_that_of_the_innermost_range():
    found = breakdown(CPU, [], 120e-6, weights={"full": [64]})
    assert not found.gpu
    assert microseconds(found) == {
        "trunk": 7,
        "head": 5,
        "gate": 16 - 12,
        "draft": 4,
        "verify": 40,
        "sampler": 10,
        "scheduler": 10,
        "detokenise": 6,
        "other": 5 + 5 + 4,
        "idle": 20,
    }
    # An operator counts without those inside it, and those of other threads are inside somebody's.
    assert [(one.name, round(1e6 * one.seconds), one.bytes) for one in found.kernels] == [
        ("aten::addmm", 20, 64),
        ("aten::linear", 10, None),
    ]


def test_what_another_process_does_counts_only_where_the_engine_rests():
    frontend = [annotation("step", 0, 200), annotation("detokenise", 10, 20), annotation("detokenise", 140, 20)]
    found = breakdown(GPU, frontend, 200e-6)
    # 14 to 20: the host is at sampling while no kernel runs. 125 to 130 and from 140 on: nobody is at anything.
    assert microseconds(found)["detokenise"] == 20
    assert microseconds(found)["idle"] == 5 + 40


def test_what_runs_after_the_last_token_is_left_out():
    found = breakdown(GPU, [], 100e-6)
    assert sum(microseconds(found).values()) == 100 and found.doubts == []


def test_a_run_may_begin_later_than_what_was_recorded():
    later = [event | {"ts": event["ts"] + 1000} for event in GPU]
    before = [annotation("schedule", 100, 30), launch(9, 200), kernel(9, 210, 30)]  # a reading of counters
    found = breakdown([*before, *later], [], 150e-6, begin=1000.0)
    assert sum(one.calls for one in found.kernels) == sum(one.calls for one in breakdown(GPU, [], 150e-6).kernels)
    assert microseconds(found) == microseconds(breakdown(GPU, [], 150e-6))
    every_moment_is_counted_once(found, 1000, 1150)


@pytest.mark.parametrize(
    ("seconds", "begin", "wall"),
    [
        (80e-6, 20, 80e-6),  # a request was made ready in 10 us
        (60e-6, 30, 70e-6),  # the clock that took the seconds disagrees: the run holds its steps,
        (200e-6, 0, 100e-6),  # and nothing from before the recording
    ],
)
def test_a_run_ends_with_its_last_step(seconds, begin, wall):
    events = [
        annotation("schedule", 5, 3),
        annotation("step", 30, 20),
        annotation("detokenise", 40, 5),
        annotation("step", 60, 40),
        launch(1, 110),
        kernel(1, 120, 30),
    ]
    assert trace.window(events, seconds) == (pytest.approx(begin), pytest.approx(wall))


def test_a_trace_without_steps_has_no_run():
    with pytest.raises(ValueError, match="no range of an engine step"):
        trace.window(GPU, 1.0)


def test_clocks_that_disagree_are_noticed():
    moved = [event | {"ts": event["ts"] + 400} for event in GPU]
    more = [annotation("verify", 10 * number, 5) for number in range(20)]
    found = breakdown([*more, *moved], [], 200e-6)
    assert "outside the run" in found.doubts[0]


def test_a_trace_is_read_on_the_clock_of_the_run(tmp_path):
    file = tmp_path / "trace.json.gz"
    events = [annotation("verify", 5.5, 2), {"ph": "M", "name": "process_name"}]
    document = {"baseTimeNanoseconds": 1_790_857_026_000_000_000, "traceEvents": events}
    file.write_bytes(gzip.compress(json.dumps(document).encode()))
    (event,) = trace.read(file, 1_790_857_026_000_002_000)
    assert event["ts"] == pytest.approx(3.5)


def test_a_trace_without_ranges_is_refused():
    with pytest.raises(ValueError, match="no range of a verify pass"):
        breakdown([launch(1, 0), kernel(1, 1, 1)], [], 1.0)
