import time
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from points import measured

from selfspec_cli import interrupts
from selfspec_cli.config.keys import engine_key, run_key
from selfspec_cli.config.schema import (
    ConfigError,
    EngineConfig,
    GateConfig,
    Method,
    ModelConfig,
    RunConfig,
    WorkloadConfig,
    gate_threshold,
)
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.record import folder, tables
from selfspec_cli.record.tracking import Tracker
from selfspec_cli.stages import plan as planning
from selfspec_cli.stages import sweep

VARH = GateConfig(kind="varH")


class Lab:
    """Fake engines and a fake bench that remember what was asked of them."""

    def __init__(self, folder):
        self.folder, self.engines, self.live, self.measured, self.pace = folder, [], 0, [], 100.0
        self.fail_point = self.fail_open = self.fail_close = lambda cfg: None

    @contextmanager
    def open_engine(self, cfg):
        gates = []
        engine = SimpleNamespace(cfg=cfg, gates=gates, set_gate=lambda *gate: gates.append(gate))
        self.engines.append(engine)
        if error := self.fail_open(cfg):
            raise error
        assert self.live == 0, "two engines at once"
        self.live += 1
        yield engine
        self.live -= 1
        if error := self.fail_close(cfg):
            raise error

    def bench(self, cfg, engine, progress):
        assert engine_key(engine.cfg) == engine_key(cfg)
        if cfg.method is Method.layer_skip:
            assert engine.gates[-1] == (cfg.gate.kind, gate_threshold(cfg))
        if error := self.fail_point(cfg):
            raise error
        self.measured.append(cfg)
        pace = self.pace if cfg.method is Method.baseline else 1.5 * self.pace
        return measured(pace, 1.01 * pace, 0.99 * pace)

    def run(self, cfgs, **options):
        cfgs = [replace(cfg, results_dir=str(self.folder)) for cfg in cfgs]
        return sweep.run(cfgs, open_engine=self.open_engine, bench=self.bench, **options)

    def points(self):
        return folder.read(self.folder)[0]

    def rows(self):
        return [tables.row(point) for point in self.points()]


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


VARH_SWEEP = [RunConfig(gate=VARH, threshold=tau) for tau in (4.0, 5.0, 6.0)]


def test_a_gate_sweep_opens_two_engines_baseline_first(lab):
    result = lab.run(VARH_SWEEP)
    assert [engine.cfg.method for engine in lab.engines] == [Method.baseline, Method.layer_skip]
    assert lab.engines[1].gates == [("varH", 4.0), ("varH", 5.0), ("varH", 6.0)]
    assert [row.arm for row in lab.rows()] == ["baseline", *["layer_skip"] * 3]
    assert [row.speedup for row in lab.rows()] == pytest.approx([1.0, 1.5, 1.5, 1.5])
    assert {row.run_id for row in lab.rows()} == {result.run_id}
    base, *arms = lab.points()
    assert {arm.compared_with.baseline for arm in arms} == {base.id}
    assert result.exit_code == 0
    assert lab.live == 0
    for point in lab.points():
        assert point.config["results_dir"] == str(lab.folder)
        assert point.versions["python"] and point.hardware["cores"] and point.device and point.command
        assert point.start_seconds is not None and point.seconds is not None
        assert point.digests["model"]


def test_workloads_share_the_engines_and_each_has_its_own_baseline(lab):
    works = [WorkloadConfig(name=name, input_len=length) for name, length in (("a", 8), ("b", 16))]
    lab.run([RunConfig(workload=work) for work in works])
    assert len(lab.engines) == 2
    measured = [(cfg.method, cfg.workload.name) for cfg in lab.measured]
    assert measured == [(method, name) for method in (Method.baseline, Method.layer_skip) for name in "ab"]


def is_five(cfg):
    return cfg.threshold == 5 and cfg.gate == VARH


@pytest.mark.parametrize(
    ("hook", "error", "where", "statuses", "engines", "code"),
    [
        # A fresh engine for the rest: the failure may have broken the first. Bad input leaves it alive.
        ("point", RuntimeError("out of\nmemory"), is_five, ["ok", "ok", "failed: out of memory", "ok"], 3, 1),
        ("point", SettingsError("no gate"), is_five, ["ok", "ok", "failed: no gate", "ok"], 2, 2),
        ("open", ConfigError("bad"), bool, ["failed: bad", *["failed: its baseline failed: bad"] * 3], 1, 2),
        ("close", RuntimeError("stuck"), lambda cfg: cfg.method is Method.layer_skip, ["ok"] * 4, 2, 0),
    ],
    ids=["a point", "bad input", "a baseline", "closing"],
)
def test_what_fails_is_a_row_or_a_warning_and_the_sweep_goes_on(lab, hook, error, where, statuses, engines, code):
    setattr(lab, f"fail_{hook}", lambda cfg: error if where(cfg) else None)
    result = lab.run(VARH_SWEEP)
    assert [row.status for row in lab.rows()] == statuses
    assert (len(lab.engines), result.exit_code) == (engines, code)
    assert all((row.speedup is None) == (row.status != "ok") for row in lab.rows())
    assert result.warnings == (["closing an engine: stuck"] if hook == "close" else [])


def test_an_engine_that_does_not_start_fails_all_its_points_and_only_them(lab):
    lab.fail_open = lambda cfg: RuntimeError("no") if cfg.layer == 2 else None
    result = lab.run([RunConfig(layer=layer, gate=VARH, threshold=tau) for layer in (2, 6) for tau in (4.0, 5.0)])
    assert [row.status for row in lab.rows()] == ["ok", "failed: no", "failed: no", "ok", "ok"]
    assert result.exit_code == 1


def test_a_rerun_of_what_is_finished_opens_no_engine(lab):
    lab.run(VARH_SWEEP)
    before = lab.rows()
    result = lab.run(VARH_SWEEP)
    assert len(lab.engines) == 2
    assert (result.skipped, result.points, result.exit_code) == (3, [], 0)
    assert lab.rows() == before
    lab.run(VARH_SWEEP, again=True)
    assert len(lab.engines) == 4


@pytest.mark.parametrize("ends", [True, False])
def test_an_interrupt_keeps_the_rows_and_is_no_failure_of_a_point(lab, ends):
    """An engine's own processes get Ctrl-C too; that such an engine then fails is the interrupt, not a result."""

    def interrupt():
        if ends:
            raise KeyboardInterrupt
        interrupts._note(2, None)
        return RuntimeError("the engine core is dead")

    lab.fail_point = lambda cfg: interrupt() if is_five(cfg) else None
    with pytest.raises(KeyboardInterrupt):
        lab.run(VARH_SWEEP)
    assert [row.status for row in lab.rows()] == ["ok", "ok"]
    assert lab.live == 0
    interrupts.check()  # the interrupt is over
    lab.fail_point = lambda cfg: None
    assert [row.threshold for row in lab.run(VARH_SWEEP).rows] == [None, 5, 6]


def test_a_results_folder_in_use_is_refused(lab):
    with folder.writing(lab.folder), pytest.raises(ConfigError, match="pid"):
        lab.run(VARH_SWEEP)
    assert lab.engines == []


def test_a_sweep_writes_to_one_folder():
    with pytest.raises(ConfigError, match="a,b"):
        planning.results_dir([RunConfig(results_dir="a"), RunConfig(results_dir="b")])


def test_a_tracker_gets_every_row_and_its_failure_is_a_warning(lab):
    def log(record):
        seen.append(record)
        raise OSError("no network")

    tracker, seen = Tracker(), []
    tracker.log = log
    result = lab.run(VARH_SWEEP, tracker=tracker)
    assert len(seen) == 4
    assert result.exit_code == 0
    assert "no network" in result.warnings[0]


def distinguished(cfgs):
    texts = planning.distinguishing_settings(planning.plan(cfgs).points)
    return [texts[run_key(cfg)] for cfg in cfgs]


def test_points_that_a_row_would_call_the_same_are_told_apart_by_their_settings():
    eager, half = EngineConfig(device="cpu", enforce_eager=True), ModelConfig(dtype="bfloat16")
    assert distinguished([RunConfig(), RunConfig(engine=eager), RunConfig(model=half), RunConfig(gate=VARH)]) == [
        "model.dtype=float32 engine.enforce_eager=False",
        "model.dtype=float32 engine.enforce_eager=True",
        "model.dtype=bfloat16 engine.enforce_eager=False",
        "",
    ]
    extra = [RunConfig(engine=EngineConfig(device="cpu", extra=more)) for more in ({}, {"block_size": 32})]
    assert distinguished(extra) == ["engine.extra.block_size=null", "engine.extra.block_size=32"]
    assert distinguished([RunConfig(seed=1), RunConfig(seed=2)]) == ["seed=1", "seed=2"]


def test_a_valid_baseline_is_reused_where_that_is_asked_for_and_the_point_says_so(lab):
    lab.run(VARH_SWEEP)
    lab.pace = 50.0
    lab.run([RunConfig(gate=VARH, threshold=7.0)], reuse_baseline=True)
    first, *_, late = lab.points()
    assert [engine.cfg.method for engine in lab.engines[2:]] == [Method.layer_skip]
    assert (late.compared_with.baseline, late.compared_with.reused) == (first.id, True)
    assert late.compared_with.speedup == pytest.approx(0.75)
    lab.run([RunConfig(gate=VARH, threshold=7.0, seed=1)], reuse_baseline=True)  # another workload: none is valid
    assert not lab.points()[-1].compared_with.reused


def test_how_long_it_may_take_comes_from_comparable_points(lab):
    assert planning.plan(VARH_SWEEP).seconds is None
    lab.run(VARH_SWEEP[:1])
    known = [replace(head, seconds=20.0, start_seconds=60.0) for head in folder.read(lab.folder)[0]]
    rest = [replace(cfg, results_dir=str(lab.folder)) for cfg in VARH_SWEEP[1:]]
    assert planning.plan(rest, known).seconds == 2 * 60 + 3 * 20  # two engines; a baseline and two arms
    longer = [replace(cfg, workload=replace(cfg.workload, output_len=999)) for cfg in rest]
    assert planning.plan(longer, known).seconds is None
    elsewhere = [replace(head, device="another") for head in known]
    assert planning.plan(rest, elsewhere).seconds is None


def test_only_what_failed_is_tried_again(lab):
    lab.fail_point = lambda cfg: RuntimeError("boom") if is_five(cfg) else None
    assert len(lab.run(VARH_SWEEP[:2]).failed) == 1
    lab.fail_point, lab.measured = lambda cfg: None, []
    found = lab.run(VARH_SWEEP, retry_failed=True)
    assert [cfg.threshold for cfg in lab.measured if cfg.method is not Method.baseline] == [5]
    assert found.skipped == 1 and found.exit_code == 0
    assert lab.run(VARH_SWEEP, retry_failed=True).points == []  # tau_v=6 was never tried, so it has not failed
    assert [cfg.threshold for cfg in lab.measured[-1:]] == [5]


def test_a_sweep_that_is_out_of_time_ends_between_points_and_goes_on_later(lab, monkeypatch):
    clock = SimpleNamespace(time=lambda: len(lab.measured), perf_counter=time.perf_counter)
    monkeypatch.setattr(sweep, "time", clock)
    found = lab.run(VARH_SWEEP, ends=2)
    assert (len(found.points), found.left, found.exit_code) == (2, 2, 0)
    opened = len(lab.engines)
    assert lab.run(VARH_SWEEP, ends=0).left == 3 and len(lab.engines) == opened  # no engine for nothing
    again = lab.run(VARH_SWEEP)
    assert again.left == 0 and {row.threshold for row in lab.rows() if row.arm != "baseline"} == {4, 5, 6}
