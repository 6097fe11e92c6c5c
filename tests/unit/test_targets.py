"""Targets stand in experiment files, belong to the points that were measured by them, and decide nothing."""

import pytest
from points import baseline, point

from selfspec_cli.config.choices import experiment_files
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.record import tables
from selfspec_cli.record.targets import Target, experiments_of, less_is_better, targets_of
from selfspec_cli.report import page, sources
from selfspec_cli.report.table import wish

MINE = """
overrides: [gate=varH]
targets:
  - for: {arm: layer_skip, gate: varH}
    tok_s: 820
    baseline_tok_s: 400
    delta_ppl: [0.18, 1.5]
    source: a paper
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").mkdir()

    def write(text):
        (tmp_path / "experiments" / "mine.yaml").write_text(text)

    write(MINE)
    return write


def by(experiment, key="1", **more):
    return point(key, command=["selfspec", "sweep", f"experiment={experiment}"], **more)


def test_a_target_is_a_ratio_where_the_baseline_of_its_source_is_known(mine):
    (target,) = targets_of([by("mine"), by("mine", "2")])
    assert target.values == {"speedup": (2.05, 2.05), "delta_ppl": (0.18, 1.5)}
    assert (target.experiment, target.source) == ("mine", "a paper")


def test_points_of_other_commands_have_no_target(mine):
    assert targets_of([baseline(), point(command=None)]) == []
    assert targets_of([by("deleted_since")]) == []
    assert experiments_of(by("m0_baseline,mine")) == ["m0_baseline", "mine"]


def test_the_sprints_targets_are_in_its_experiments_and_ask_no_arm_for_what_it_cannot_have():
    known = [target for name in experiment_files() for target in targets_of([by(name)])]
    names = ["m0_baseline", "m1_skip", "m2_lsq", "m3_maxp", "m4_varh", "m_qwen"]
    assert sorted({one.experiment for one in known}) == names
    speedups = sorted((one.experiment, round(one.values["speedup"][0], 3)) for one in known if "speedup" in one.values)
    assert speedups == [("m2_lsq", 1.525), ("m3_maxp", 1.8), ("m4_varh", 2.05), ("m_qwen", 1.8), ("m_qwen", 2.05)]
    assert all(one.source for one in known)
    assert {one.arm.get("arm") for one in known if "accept_rate" in one.values} == {"layer_skip"}, (
        "others draft nothing"
    )
    assert not any("speedup" in one.values for one in known if one.arm.get("arm") == "baseline"), "compared with itself"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("overrides: []\ntargets: 5", "must be a list of mappings"),
        ("overrides: []\ntargets: [{for: 5}]", "must map columns"),
        ("overrides: []\ntargets: [{for: {gaet: varH}}]", "did you mean 'gate'"),
        ("overrides: []\ntargets: [{accept_rat: 0.4}]", "did you mean 'accept_rate'"),
        ("overrides: []\ntargets: [{accept_rate: many}]", "accept_rate='many'"),
        ("overrides: []\ntarget: []", "did you mean 'targets'"),
    ],
)
def test_a_target_that_cannot_be_understood_is_bad_input(mine, text, message):
    mine(text)
    with pytest.raises(ConfigError, match=message):
        targets_of([by("mine")])


def test_money_failures_and_perplexity_are_better_where_they_are_less():
    assert all(map(less_is_better, ("failed_requests", "ppl_of_greedy", "delta_ppl_high", "tpot_p99_ms")))
    assert not any(map(less_is_better, ("speedup", "goodput", "k", "load_share", "window")))


def test_what_is_reached_depends_on_which_way_is_better():
    target = Target("e", {"arm": "layer_skip"}, {"speedup": (2, 2), "ttft_ms": (120, 120)})
    row = tables.row(point())
    row.speedup, row.ttft_ms = 2.1, 130.0
    assert (target.reached(row, "speedup"), target.reached(row, "ttft_ms")) == (True, False)
    row.ttft_ms = None
    assert target.reached(row, "ttft_ms") is None
    row.acceptance_length = 3.0
    assert not target.is_for(row)
    assert (wish("speedup", 2, 2), wish("ttft_ms", 120, 120)) == ("speedup ≥ 2.00x", "ttft_ms ≤ 120")
    assert wish("delta_ppl", 0.18, 1.5) == "delta_ppl +0.18 to +1.50"


def test_the_page_says_what_was_reached_and_has_no_targets_without_an_experiment(mine):
    rows = page.targets(sources.of_points([by("mine")]))
    assert [(one["target"], one["measured"], one["reached"]) for one in rows] == [
        ("speedup ≥ 2.05x", "not measured", ""),
        ("delta_ppl +0.18 to +1.50", "not measured", ""),
    ]
    assert page.targets(sources.of_points([baseline()])) == []
