"""Figures hold what was measured, only where something was measured, and say which points they came from."""

from dataclasses import replace

import pytest
from points import ARM, BASELINE, against, baseline, drafts, measured, point

from selfspec_cli.record.point import compare
from selfspec_cli.report import export, figures, sources
from selfspec_cli.report.figures.drafts import frontier_of

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
    assert set(made) == {"speedup", "latency"}
    (panel,) = made["speedup"].panels
    assert panel.points == (base.id, arm.id)
    assert [(row["arm"], row["speedup"]) for row in panel.data] == [
        ("baseline", 1.0),
        ("E=4 k=5 · lens · varH ≤ 5", 1.5),
    ]
    low, high = arm.compared_with.low, arm.compared_with.high
    assert (panel.data[1]["low"], panel.data[1]["high"]) == pytest.approx((low, high), rel=1e-4)
    ttft = next(panel for panel in made["latency"].panels if "TTFT" in panel.name)
    assert ttft.data[0]["middle"] == pytest.approx(10.0)  # a quarter of 4 tokens at 100 tokens a second, in ms


def test_a_loss_has_the_colour_of_losses_and_a_lossy_arm_its_own():
    base = baseline()
    slow = against(base, "2", 80.0, 81.0, 79.0)
    lossy = against(base, "3", arm=ARM | {"arm": "skip"})
    kinds = {row["point"]: row["kind"] for row in drawn(base, slow, lossy)["speedup"].panels[0].data}
    assert kinds == {base.id: "baseline", slow.id: "slower than the baseline", lossy.id: "not verified"}


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


def test_speed_by_batch_marks_losses():
    points = []
    for batch, speed in ((1, 150.0), (8, 90.0)):
        base = point(f"{batch}", BASELINE | {"batch": batch})
        points += [base, against(base, f"a{batch}", speed, speed, speed, arm=ARM | {"batch": batch})]
    (panel,) = drawn(*points)["by_batch"].panels
    assert [(row["load"], row["loss"]) for row in panel.data] == [(1, False), (8, True)]


def test_the_frontier_is_what_nothing_dominates():
    assert frontier_of([(0.0, 1.0), (0.0, 1.8), (1.0, 1.5), (1.5, 2.5), (2.0, 2.5)]) == {1, 3}
    base = replace(baseline(), perplexity=10.0)
    lossy = measured(190.0, 191.0, 192.0, perplexity=11.5)
    arm = point("3", ARM | {"arm": "skip"}, lossy, compared_with=compare(lossy, base, reused=False, real_text=True))
    (panel,) = drawn(base, arm)["frontier"].panels
    assert [(row["delta"], row["frontier"]) for row in panel.data] == [(0.0, True), (1.5, True)]
    assert "frontier" not in drawn(base, against(base))


def test_energy_is_power_over_speed():
    base = replace(baseline(), engine={"power_w": 300.0})
    (panel,) = drawn(base)["energy"].panels
    assert panel.data[0]["joules"] == 3.0


def test_quality_is_drawn_with_what_says_how_sure_it_is():
    words = "gsm exact_match 0.310 ± 0.050 (drafted); hella acc 0.500"
    made = drawn(baseline(), scores=words, ppl_of_greedy=8.0, ppl_of_greedy_low=7.5, ppl_of_greedy_high=8.5)
    intervals = {
        panel.name: [panel.data[0][name] for name in ("value", "low", "high")] for panel in made["scores"].panels
    }
    assert intervals == {"gsm exact_match (drafted)": [0.31, 0.26, 0.36], "hella acc": [0.5, None, None]}
    (panel,) = made["perplexity"].panels
    assert [panel.data[0][name] for name in ("value", "low", "high")] == [8.0, 7.5, 8.5]


def test_figures_are_files_for_a_paper(tmp_path):
    files = export.every([drawn(baseline(), against(baseline()))["speedup"]], tmp_path)
    assert [file.name for file in files] == ["speedup.svg", "speedup.png"]
    text = files[0].read_text()
    assert "1.50x" in text and "varH ≤ 5" in text
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_one_repeat_has_no_interval():
    base = point("0", BASELINE, measured(100.0))
    arm = point("1", ARM, measured(150.0), compared_with=compare(measured(150.0), base, reused=False, real_text=True))
    assert drawn(base, arm)["speedup"].panels[0].data[1]["low"] is None
