import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import records
from selfspec_cli.record.records import Record
from selfspec_cli.report import figure, page, rows, table
from selfspec_cli.report import make as report

BASE = Record(run_id="r", time="2026-11-21T00:00:00+0000", arm="baseline", model="m", workload="headline", batch=1,
              input_len=32, output_len=128, temperature=0.0, repeats=5, tok_s_median=100.0, tok_s_min=90.0,
              tok_s_max=105.0, speedup=1.0, device="a machine", key="0" * 12)  # fmt: skip
ARM = replace(BASE, arm="layer_skip", E=4, k=5, head="lens", vocab="full", gate="varH", threshold=5.0,
              tok_s_median=150.0, tok_s_min=140.0, tok_s_max=160.0, speedup=1.5, accept_rate=0.625,
              identical=31, outputs=32, key="1" * 12)  # fmt: skip
FAILED = replace(ARM, threshold=6.0, tok_s_median=None, tok_s_min=None, tok_s_max=None, speedup=None,
                 accept_rate=None, status="failed: <no> memory", key="2" * 12)  # fmt: skip


def printed(shown):
    file = StringIO()
    table.show(shown, Console(file=file))
    return file.getvalue()


def test_the_table_has_the_figures_and_the_target():
    text = printed([BASE, ARM])
    (line,) = [line for line in text.splitlines() if "varH ≤ 5" in line and "E=4" in line and "140" in line]
    for figure_ in ("150.0 (140–160)", "1.50x", "62%", "31/32", "2.05x, 50%"):
        assert figure_ in line
    assert "Fastest verified arm: 1.50x" in text


def test_a_failed_arm_is_named_with_its_reason():
    assert "varH ≤ 6: failed: <no> memory" in printed([BASE, FAILED])


def test_what_was_not_measured_is_blank_and_not_zero():
    bare = replace(ARM, accept_rate=None, identical=None, ppl=None, tok_s_min=None)
    cells = dict(zip([name for name, _, _ in table.COLUMNS], table.cells(bare), strict=True))
    assert (cells["accept"], cells["same"], cells["PPL"], cells["tok/s"]) == ("", "", "", "150.0")
    zero = replace(ARM, accept_rate=0.0, identical=0)
    assert table.cells(zero)[4] == "0%"
    assert table.cells(zero)[-1] == "0/32"


def test_the_last_measurement_of_a_key_wins_and_a_failure_never_hides_one():
    newer, broken = replace(ARM, speedup=1.6), replace(ARM, status="failed: x")
    assert rows.latest([ARM, newer]) == [newer]
    assert rows.latest([ARM, broken]) == [ARM]
    assert rows.latest([broken, ARM]) == [ARM]


def test_rows_of_other_workloads_and_machines_stand_apart():
    other = [replace(BASE, batch=4), replace(BASE, device="another"), replace(BASE, model="n")]
    assert len(rows.groups([ARM, BASE, *other])) == 4
    assert [row.arm for row in rows.groups([ARM, BASE])[0][1]] == ["baseline", "layer_skip"]


@pytest.mark.parametrize(
    ("row", "speedup", "accept"),
    [
        (replace(ARM, gate="varH", threshold=5.0), 2.05, 0.50),
        (replace(ARM, gate="maxp", threshold=0.35), 1.8, 0.40),
        (replace(ARM, arm="skip", head="lsq", E=12), 1.525, 0.37),
    ],
)
def test_the_targets_are_the_promised_ones(row, speedup, accept):
    target = rows.target_for(row)
    assert target.speedup == pytest.approx(speedup)
    assert target.accept_rate == accept


@pytest.mark.parametrize(
    "row", [BASE, replace(ARM, threshold=4.0), replace(ARM, gate="maxp"), replace(ARM, arm="skip", head="lens", E=12)]
)
def test_other_arms_have_no_target(row):
    assert rows.target_for(row) is None


SET = replace(ARM, acceptance_length=3.0, speedup=1.9, tok_s_median=190.0, identical=None, outputs=None, key="4" * 12)


def test_acceptance_that_was_set_is_said_and_stands_apart_from_real():
    for arm, name in (("layer_skip", "E=4 k=5 · lens · varH ≤ 5"), ("ngram", "vLLM n-gram k=5"),
                      ("draft_model", "vLLM draft_model of 4 layers k=5")):  # fmt: skip
        assert rows.label(replace(SET, arm=arm)) == f"{name} · acceptance set to 3"
    (real, arms), (set_, others) = rows.groups([ARM, BASE, SET, replace(BASE, batch=4)])[:2]
    assert (arms, others) == ([BASE, ARM], [BASE, SET])
    assert set_ == f"{real}, acceptance set to 3"
    assert len(rows.groups([BASE, SET])) == len(rows.groups([BASE])) == 1
    assert "acceptance" not in printed([BASE, ARM])


def test_the_headline_prefers_real_acceptance_and_says_where_there_is_none():
    assert "1.50x the baseline (E=4 k=5 · lens · varH ≤ 5, 62%" in rows.headline([BASE, SET, ARM])
    assert "1.90x the baseline (E=4 k=5 · lens · varH ≤ 5 · acceptance set to 3" in rows.headline([BASE, SET])


def test_a_target_is_reached_by_what_was_measured_alone():
    assert rows.target_for(SET) is None
    text = page.html([FAILED, SET], None, {})
    assert text.count("not measured") == len(rows.TARGETS)
    assert page.html([BASE, FAILED], None, {}).count("not measured") == len(rows.TARGETS) - 1


def test_long_names_are_whole_where_the_output_is_no_terminal():
    arm = replace(SET, draft_weights="fp8", vocab="32768", verification="adaptive", gate="calibrated", threshold=0.123,
                  ttft_ms=1.0, itl_ms=1.0, ppl=10.0, delta_ppl=0.0, mean_accepted_len=3.0,
                  drafted_per_round=3.0)  # fmt: skip
    assert "…" not in printed([BASE, arm])


def test_the_span_is_relative_to_the_baseline():
    assert rows.span(ARM) == pytest.approx((1.4, 1.6))
    assert rows.span(replace(ARM, tok_s_min=None)) is None


def test_skip_is_never_the_fastest_verified_arm():
    fast = replace(ARM, arm="skip", speedup=9.0)
    assert "1.50x" in rows.headline([BASE, ARM, fast])
    assert "No verified arm" in rows.headline([BASE, fast, FAILED])


def test_the_chart_is_a_png_and_nothing_without_a_speedup(tmp_path):
    path = figure.draw([BASE, ARM, FAILED, replace(BASE, batch=4, key="3" * 12)], tmp_path / "deep" / "chart.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert figure.draw([FAILED], tmp_path / "none.png") is None


def test_the_page_is_self_contained_and_escapes(tmp_path):
    png = figure.draw([BASE, ARM], tmp_path / "chart.png")
    text = page.html([BASE, ARM, FAILED], png, {"machine": "<b>"})
    assert not re.search(r"""(src|href)=["'](?!data:)|https?://|@import|url\(""", text)
    assert "data:image/png;base64," in text
    assert "&lt;no&gt; memory" in text
    assert "<b>" not in text
    assert 'class="best"' in text
    assert "2.05x" in text


def test_the_stage_writes_chart_and_page(tmp_path):
    for row in (BASE, ARM, FAILED):
        records.append(tmp_path / "in" / "summary.csv", row)
    made = report.run(tmp_path / "in", tmp_path / "out")
    assert made.chart == tmp_path / "out" / "speedup.png"
    assert made.page.read_text().count("<tr") > 4
    assert len(made.rows) == 3


def test_no_rows_say_how_to_make_some(tmp_path):
    with pytest.raises(ConfigError, match="selfspec sweep"):
        report.run(tmp_path, tmp_path)


def test_provenance_comes_from_the_runs_folder(tmp_path):
    assert report.provenance_of(ARM, tmp_path) == {"machine": "a machine", "date": "2026-11-21"}
    folder = tmp_path / "runs" / ARM.key
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"versions": {"vllm": "0.32.0"}, "git": {"revision": "abc", "dirty": true}}')
    facts = report.provenance_of(ARM, tmp_path)
    assert facts["versions"] == "vllm 0.32.0"
    assert facts["git revision"] == "abc with changes"


def test_roc_figures_in_the_results_are_in_the_page(tmp_path):
    for row in (BASE, ARM):
        records.append(tmp_path / "summary.csv", row)
    folder = tmp_path / "roc" / "m"
    folder.mkdir(parents=True)
    figure.draw([BASE, ARM], folder / "roc.png")
    (folder / "auc.csv").write_text("gate,auc\n<margin>,0.81\n")
    text = report.run(tmp_path, tmp_path).page.read_text()
    assert text.count("data:image/png") == 2
    assert "ROC of the gates: m" in text
    assert "<td>&lt;margin&gt;</td><td>0.81</td>" in text


def test_every_gate_is_labelled_with_its_direction():
    labels = [rows.gate_label(replace(ARM, gate=name, threshold=0.5)) for name in ("margin", "entropy", "calibrated")]
    assert labels == ["margin ≥ 0.5", "entropy ≤ 0.5", "calibrated ≥ 0.5"]


def test_a_label_names_what_is_not_the_default():
    assert rows.label(ARM) == "E=4 k=5 · lens · varH ≤ 5"
    changed = replace(ARM, draft_weights="fp8", vocab="4096", verification="adaptive")
    assert rows.label(changed) == "E=4 k=5 · lens V'=4096 · fp8 draft · varH ≤ 5 · adaptive verification"
