"""Findings about quality: perplexities with intervals, files, and the columns that rows carry."""

import csv
import json
import math
from dataclasses import replace

import numpy
import pytest
from points import against, baseline, point

from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import GateConfig, Method, RunConfig, WorkloadConfig
from selfspec_cli.record import folder, quality, tables
from selfspec_cli.record.quality import EVAL, GENERATED, TEXT, Finding
from selfspec_cli.texts.library import rolling

NATS, TOKENS = [10.0, 30.0, 24.0, 50.0], [10, 20, 16, 25]
MORE = [11.0, 31.5, 24.5, 52.0]
ARM = "a" * 12


def finding(kind=TEXT, found=None, run="20261122-000000-aaaa", **more):
    found = found or {
        "documents": list("abcd"),
        "scores": {"nats": MORE, "tokens": TOKENS},
        "baseline": {"nats": NATS, "tokens": TOKENS},
    }
    protocol = {"corpus": "stdlib", "window": 512, "stride": 256, "part": None}
    named = (kind, more.pop("arm_key", ARM), run, "2026-11-22T00:00:00+0000", "a machine")
    return Finding(*named, {"arm": "skip"}, "b" * 12, protocol, found, **more)


def test_a_perplexity_is_of_all_tokens_and_its_interval_over_documents():
    scores = finding().scores(baseline=True)
    assert scores.perplexity == pytest.approx(math.exp(sum(NATS) / sum(TOKENS)))
    low, high = scores.interval()
    assert math.exp(1.0) <= low < scores.perplexity < high <= math.exp(2.0)  # the least and the most of one document
    draw = numpy.random.default_rng(1).integers(0, 4, (4000, 4))  # the same by hand
    drawn = numpy.exp(numpy.array(NATS)[draw].sum(1) / numpy.array(TOKENS)[draw].sum(1))
    assert [low, high] == pytest.approx(list(numpy.percentile(drawn, [2.5, 97.5])), rel=0.03)


def test_a_difference_is_paired_by_document():
    """The sides differ by 0.02 to 0.1 nats a token in every document, and by far less than documents do."""
    ours, theirs = finding().scores(), finding().scores(baseline=True)
    low, high = ours.interval(theirs)
    assert 0 < low < ours.perplexity - theirs.perplexity < high
    assert high - low < 0.3 * (theirs.interval()[1] - theirs.interval()[0])
    assert theirs.interval(theirs) == (0.0, 0.0)


SHAPES = [(30, 8, 4), (30, 8, 7), (8, 8, 1), (9, 8, 3), (2, 8, 4), (31, 5, 1)]


@pytest.mark.parametrize(("length", "window", "stride"), SHAPES)
def test_rolling_windows_score_every_token_but_the_first_once(length, window, stride):
    places = list(rolling(length, window, stride))
    assert [at for _, scored, end in places for at in range(scored, end)] == list(range(1, length))
    for number, (start, scored, end) in enumerate(places):
        assert end - start <= window
        assert scored > start
        assert scored - start >= (window - stride if number and end - start == window else 1)


def test_the_widest_stride_is_the_rule_of_lm_eval():
    get = pytest.importorskip("lm_eval.utils").get_rolling_token_windows
    ids = list(range(100, 131))
    ours = [(ids[start : end - 1], ids[scored:end]) for start, scored, end in rolling(len(ids), 9, 8)]
    assert ours == list(get(ids[1:], ids[0], 8, 1))
    ours = [(ids[start : end - 1], ids[scored:end]) for start, scored, end in rolling(len(ids), 9, 3)]
    assert ours == list(get(ids[1:], ids[0], 8, 6))


@pytest.mark.parametrize("stride", [0, 8])
def test_a_stride_that_skips_or_repeats_is_refused(stride):
    with pytest.raises(ValueError, match="from 1 to window - 1 = 7"):
        list(rolling(30, 8, stride))


def test_a_finding_is_kept_and_its_newest_is_a_column(tmp_path):
    folder.save_finding(tmp_path, finding())
    newer = finding(
        found={"documents": ["a"], "scores": {"nats": [3.0], "tokens": [3]}, "baseline": None},
        run="20261122-000001-aaaa",
    )
    folder.save_finding(tmp_path, newer)
    (tmp_path / "quality" / "other.json").write_text("[]")
    book = quality.read(tmp_path)
    assert book.findings == {(TEXT, ARM): newer}
    columns = book.columns(ARM, "")
    assert columns["ppl"] == pytest.approx(math.e)
    assert (columns["ppl_low"], columns["delta_ppl"]) == (None, None)  # one document, and no baseline
    assert columns["ppl_protocol"] == "corpus=stdlib window=512 stride=256"
    assert book.columns("c" * 12, "") == book.columns(None, "") == {}


def scores_of(*parts):
    return {
        name: {
            "scores": {"nats": MORE, "tokens": TOKENS},
            "baseline": {"nats": NATS, "tokens": TOKENS},
            "identical": 3,
            "outputs": 4,
        }
        for name in parts
    }


def test_rows_carry_what_was_found_of_their_arm(tmp_path):
    base = replace(baseline(), arm_key="b" * 12)
    folder.save(tmp_path, base)
    folder.save(tmp_path, against(base, arm_key=ARM))
    folder.save(tmp_path, against(base, "2", number=2, run_id="20261122-000000-bbbb"))  # from before arms had keys
    folder.save_finding(tmp_path, finding(GENERATED, scores_of("greedy", "sampled")))
    score = {"task": "t", "metric": "acc", "value": 0.5, "stderr": 0.05, "samples": 100, "same": 100, "drafted": True}
    folder.save_finding(tmp_path, finding(EVAL, {"scores": [score, score | {"drafted": False, "stderr": None}]}))
    (tmp_path / "verify").mkdir()
    verdict = {"verdict": "pass", "key": base.key, "cases": ["a", "b"], "time": "2026-11-22T00:00:00+0000"}
    planted = {"verdict": "fault", "planted": "kv_slot", "time": "2026-11-22T00:00:01+0000"}
    for name, document in {"old": {"verdict": "fault", "time": "2026"}, "x": {"planted": "all"}, "p": planted}.items():
        (tmp_path / "verify" / f"{base.key}-{name}.json").write_text(json.dumps(verdict | document))
    rows = [tables.row(one) for one in folder.read(tmp_path)[0]]
    assert [row.verdict for row in rows] == ["pass", None, None]
    assert rows[1].scores == "t acc 0.500 ± 0.050 (drafted); t acc 0.500"
    assert rows[1].delta_ppl_of_greedy_low < rows[1].delta_ppl_of_greedy < rows[1].delta_ppl_of_greedy_high
    assert rows[1].delta_ppl_of_sampled == rows[1].delta_ppl_of_greedy
    assert (rows[2].scores, rows[2].delta_ppl_of_greedy) == (None, None)
    folder.export(tmp_path)
    found = {row["point"]: row for row in csv.DictReader((tmp_path / "quality.csv").open())}
    assert [*found] == [row.point for row in rows[:2]]  # nothing is known of the third
    assert found[rows[1].point]["key"] == rows[1].key and found[rows[1].point]["scores"].startswith("t acc 0.500")
    assert found[rows[1].point]["verdict"] == ""  # not measured, and so not 0


def test_what_is_found_later_is_no_part_of_a_points_file(tmp_path):
    judged = replace(point(), arm_key=ARM, quality={"verdict": "pass"})
    folder.save(tmp_path, judged)
    assert "pass" not in next((tmp_path / "runs").glob("*.json")).read_text()
    assert folder.read(tmp_path)[0] == [replace(judged, quality={})]


def test_an_arm_is_the_same_whatever_its_workload():
    keys = Keys()
    cfg = RunConfig(gate=GateConfig(kind="varH"), threshold=4.0, layer=3, k=4)
    engine = replace(cfg.engine, enforce_eager=True, max_num_seqs=4)
    same = replace(cfg, workload=WorkloadConfig(batch=4), seed=3, repeats=9, perplexity_tokens=0, engine=engine)
    assert keys.arm(cfg) == keys.arm(same)
    assert keys.run(cfg) != keys.run(same)
    others = [
        replace(cfg, threshold=5.0),
        replace(cfg, layer=4),
        replace(cfg, k=5),
        replace(cfg, method=Method.skip),
        replace(cfg, model=replace(cfg.model, dtype="bfloat16")),
    ]
    assert len({keys.arm(one) for one in [cfg, *others]}) == 6
