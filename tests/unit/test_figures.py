"""Figures hold what was measured, only where something was measured, and say which points they came from."""

from dataclasses import replace

import pytest
from points import ARM, BASELINE, against, baseline, drafts, measured, point

from selfspec_cli.record.point import compare
from selfspec_cli.report import figures, sources
from selfspec_cli.report.figures.base import LOSSY, PLAIN, RIVALS

pytestmark = pytest.mark.slow  # each draws


def drawn(*points, **more):
    found = sources.of_points(points)
    for name, value in more.items():
        for row in found.rows:
            setattr(row, name, value)
    return {figure.name: figure for figure in figures.of_sources(found)}


def test_only_what_was_measured_is_drawn():
    base = baseline()
    assert set(drawn(base)) == {"latency"}
    arm = against(base)
    made = drawn(base, arm)
    assert set(made) == {"speedup", "identical", "latency"}
    (panel,) = made["speedup"].panels
    assert panel.points == (base.id, arm.id)
    assert [row["arm"] for row in panel.data] == ["baseline", "E=4 k=5 · lens · varH ≤ 5"]
    assert [row["speedup"] for row in panel.data] == [1.0, 1.5]
    low, high = arm.compared_with.low, arm.compared_with.high
    assert (panel.data[1]["low"], panel.data[1]["high"]) == pytest.approx((low, high), rel=1e-4)
    ttft = next(panel for panel in made["latency"].panels if "TTFT" in panel.name)
    assert ttft.data[0]["middle"] == pytest.approx(10.0)  # a quarter of 4 tokens at 100 tokens a second, in ms


def test_an_arm_has_one_colour_in_every_figure_and_vllms_own_are_grey():
    base = baseline()
    arms = [against(base, str(n), arm=ARM | {"threshold": float(n)}) for n in (4, 5, 6)]
    rival = against(base, "7", arm=BASELINE | {"arm": "vllm", "speculative": "suffix", "k": 3})
    lossy = against(base, "8", arm=ARM | {"arm": "skip"})
    seen = {}
    for figure in drawn(base, *arms, rival, lossy).values():
        for panel in figure.panels:
            for row in panel.data:
                if "arm" in row and row["point"] != base.id:
                    seen.setdefault(row["point"], set()).add(panel.colours[row["arm"]])
    assert all(len(colours) == 1 for colours in seen.values())
    mine = [*set.union(*(seen[arm.id] for arm in arms))]
    assert len(mine) == 3 and not set(mine) & {*RIVALS, LOSSY, PLAIN}
    assert seen[rival.id] <= set(RIVALS) and seen[lossy.id] == {LOSSY}


@pytest.mark.parametrize(
    ("speeds", "red"), [((80.0, 81.0, 79.0), True), ((51.0, 90.0, 140.0), False), ((80.0,), False)]
)
def test_only_an_arm_whose_whole_interval_is_below_1_is_red(speeds, red):
    """0.51 to 1.4 was called slower, in red."""
    base = baseline()
    found = against(base, "2")
    ours = measured(*speeds)
    slow = replace(found, repeats=ours.repeats, compared_with=compare(ours, base, reused=False, real_text=True))
    row = drawn(base, slow)["speedup"].panels[0].data[1]
    assert (row["slower"], "slower" in row["text"], row["low"] is None) == (red, red, len(speeds) == 1)


def test_arms_of_one_name_are_told_apart():
    base = baseline()
    same = [against(base, key, arm=ARM | {"seed": int(key)}) for key in "12"]
    names = [row["arm"] for row in drawn(base, *same)["speedup"].panels[0].data]
    assert len(set(names)) == 3


def test_thresholds_and_lengths_are_lines_of_what_differs_in_them_alone():
    base = baseline()
    arms = [against(base, str(n), arm=ARM | {"threshold": float(n)}) for n in (4, 5, 6)]
    made = drawn(base, *arms, against(base, "9", arm=ARM | {"threshold": 4.0, "E": 9}))
    (panel,) = made["by_threshold"].panels
    assert panel.name == "gate varH"
    assert [row["x"] for row in panel.data] == [4, 5, 6]  # E=9 has one threshold: no line
    assert "by_k" not in made
    lengths = [against(base, str(k), arm=ARM | {"k": k}) for k in (2, 4)]
    assert [row["x"] for row in drawn(base, *lengths)["by_k"].panels[0].data] == [2, 4]


def test_positions_are_shares_of_rounds():
    base = baseline()
    counted = tuple(replace(one, verified=drafts(), drafting=None) for one in measured(150.0, 151.0, 152.0).repeats)
    arm = against(base, arm=ARM)
    made = drawn(base, replace(arm, repeats=counted))
    assert [row["share"] for row in made["positions"].panels[0].data] == [1.0, 0.8, 0.6, 0.4, 0.2]
    assert "positions" not in drawn(base, replace(arm, repeats=counted, arm=ARM | {"acceptance_length": 3.0}))


def by_batch(*batches, **more):
    points = []
    for batch in batches:
        work = {"batch": batch} | more
        base = point(f"{batch}{more.get('workload', '')}", BASELINE | work)
        speed = 150.0 if batch < 8 else 60.0
        points += [base, against(base, f"a{base.key}", speed, speed + 1, speed - 1, arm=ARM | work)]
    return points


def test_the_page_begins_with_the_speedup_by_load_and_its_intervals():
    made = drawn(*by_batch(1, 8))
    assert next(iter(made)) == "by_load"
    (panel,) = made["by_load"].panels
    assert panel.axis == "requests in flight"
    assert panel.note == "E=4 k=5 · lens · varH ≤ 5: 1.50x at 1, 0.60x at 8 requests in flight."
    assert [(row["load"], row["slower"]) for row in panel.data] == [(1, False), (8, True)]
    assert all(row["low"] < row["speedup"] < row["high"] for row in panel.data)
    assert "by_load" not in drawn(*by_batch(1))  # one load is no curve


def test_every_figure_begins_with_the_workload_of_the_first_and_names_no_two_panels_alike():
    """It began with what was measured first: a small model on two cores. The selector had two entries of one name."""
    alone = by_batch(1, workload="alone")
    made = drawn(*alone, *by_batch(1, workload="two"), *by_batch(1, 8), *by_batch(8, workload="two"))
    (early,) = [panel.name for panel in made["by_load"].panels[:1]]
    for name in ("speedup", "identical"):
        assert early.partition(":")[0] in f"{made[name].panels[0].group} {made[name].panels[0].name}"
        assert "alone" in f"{made[name].panels[-1].group} {made[name].panels[-1].name}"
    for figure in made.values():
        names = [(panel.group, panel.name) for panel in figure.panels]
        assert len(set(names)) == len(names)


def test_three_loads_go_before_two_and_the_last_measured_before_older_ones():
    first = by_batch(1, 4, 8, workload="three")
    later = [replace(one, time="2027-01-01T00:00:00+0000") for one in by_batch(1, 8, workload="later")]
    last = [replace(one, time="2028-01-01T00:00:00+0000") for one in by_batch(1, 8, workload="last")]
    panels = drawn(*first, *later, *last)["by_load"].panels
    assert [panel.name.split(":")[0] for panel in panels] == ["m, three", "m, last", "m, later"]


def test_what_one_user_and_one_gpu_get():
    points = [replace(one, device="2x NVIDIA H100") for one in by_batch(1, 8)]
    (panel,) = drawn(*points)["users"].panels
    one = next(row for row in panel.data if row["point"] == points[1].id)
    assert one["user"] == pytest.approx(150.0, rel=1e-2)  # a token every 1/150 s
    assert one["gpu"] == pytest.approx(75.0)  # of two
    assert {row["series"] for row in panel.data} == {"baseline", "E=4 k=5 · lens · varH ≤ 5"}
    assert {row["series"] for row in panel.data if row["number"] is not None} == {"baseline"}


def test_waits_are_medians_and_tails_of_both_times_at_each_load():
    (panel,) = drawn(*by_batch(1, 8))["waits"].panels
    shown = {(row["what"], row["load"]) for row in panel.data}
    assert shown == {("ttft", 1), ("ttft", 8), ("tpot", 1), ("tpot", 8)}
    assert all(row["value"] <= row["high"] for row in panel.data)


def test_identical_outputs_stand_beside_what_plain_decoding_repeats_of_itself():
    few, arm, many, _ = by_batch(1, 8)
    few, many = replace(few, outputs=("aa", "bb", "cc", "dd")), replace(many, outputs=("aa", "bb", "cc", "xx"))
    compared = replace(arm.compared_with, identical=2, outputs=4)
    panel = drawn(few, replace(arm, compared_with=compared), many)["identical"].panels[0]
    shown = [(row["arm"], row["text"]) for row in panel.data]
    assert shown == [("control: plain decoding, batch 8", "3 of 4"), ("E=4 k=5 · lens · varH ≤ 5", "2 of 4")]
    again = replace(few, engine=few.engine | {"as_itself": 1})
    panel = drawn(again, replace(arm, compared_with=compared))["identical"].panels[0]
    assert [row["text"] for row in panel.data] == ["1 of 4", "2 of 4"]
    assert panel.data[0]["arm"] == "control: plain decoding, asked again"
    other = replace(many, arm=many.arm | {"workload": "prose"})  # other prompts: no control
    panel = drawn(few, replace(arm, compared_with=compared), other)["identical"].panels[0]
    assert [row["arm"] for row in panel.data] == ["E=4 k=5 · lens · varH ≤ 5"]


def test_perplexities_are_a_figure_where_two_arms_differ_by_more_than_rounding():
    base = replace(baseline(), perplexity=10.0)
    same = [against(base, "2"), against(base, "3", arm=ARM | {"k": 3})]
    assert "perplexity" not in drawn(base)
    assert "perplexity" not in drawn(base, *same)
    assert "perplexity" not in drawn(base, *same, delta_ppl=1.182e-09)
    greedy = {"delta_ppl_of_greedy": 0.5, "delta_ppl_of_greedy_low": 0.1, "delta_ppl_of_greedy_high": 0.9}
    (panel,) = drawn(base, *same, **greedy, delta_ppl=1.182e-09)["perplexity"].panels
    assert [(row["text"], row["value"], row["low"], row["high"]) for row in panel.data] == [("0.5", 0.5, 0.1, 0.9)] * 3
