from contextlib import contextmanager
from dataclasses import replace

import pytest

from selfspec_cli.config.keys import engine_key, run_key
from selfspec_cli.config.schema import (
    ConfigError,
    EngineConfig,
    GateConfig,
    Method,
    ModelConfig,
    RunConfig,
    TrackerConfig,
    TrackerKind,
    WorkloadConfig,
    gate_threshold,
)
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.record import records
from selfspec_cli.record.records import AcceptRow, BenchResult, Record
from selfspec_cli.record.tracking import Tracker
from selfspec_cli.report import figure
from selfspec_cli.stages import sweep

VARH = GateConfig(kind="varH")


class FakeEngine:
    def __init__(self, cfg):
        self.cfg, self.gates = cfg, []

    def set_gate(self, kind, threshold, calibration):
        self.gates.append((kind, threshold))


class Lab:
    """Fake engines and a fake bench that remember what was asked of them."""

    def __init__(self, folder):
        self.folder, self.engines, self.live, self.measured = folder, [], 0, []
        self.fail_point = self.fail_open = self.fail_close = lambda cfg: None

    @contextmanager
    def open_engine(self, cfg):
        self.engines.append(engine := FakeEngine(cfg))
        if error := self.fail_open(cfg):
            raise error
        assert self.live == 0, "two engines at once"
        self.live += 1
        yield engine
        self.live -= 1
        if error := self.fail_close(cfg):
            raise error

    def bench(self, cfg, engine, baseline, progress):
        assert engine_key(engine.cfg) == engine_key(cfg)
        if cfg.method is Method.layer_skip:
            assert engine.gates[-1] == (cfg.gate.kind, gate_threshold(cfg))
        assert (baseline is None) == (cfg.method is Method.baseline)
        if error := self.fail_point(cfg):
            raise error
        self.measured.append(cfg)
        record = records.identity(cfg, "", layer=8)
        record.tok_s_median = 100.0 if baseline is None else 150.0
        record.speedup = 1.0 if baseline is None else record.tok_s_median / baseline.record.tok_s_median
        accept = None if baseline is None else records.accept_identity(record)
        return BenchResult(record, [[1, 2]], accept)

    def run(self, cfgs, **options):
        cfgs = [replace(cfg, results_dir=str(self.folder)) for cfg in cfgs]
        return sweep.run(cfgs, open_engine=self.open_engine, bench=self.bench, **options)

    def rows(self):
        return records.read(self.folder / "summary.csv", Record)[0]


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


VARH_SWEEP = [RunConfig(gate=VARH, tau_v=tau) for tau in (4.0, 5.0, 6.0)]


def test_a_gate_sweep_opens_two_engines_baseline_first(lab):
    result = lab.run(VARH_SWEEP)
    assert [engine.cfg.method for engine in lab.engines] == [Method.baseline, Method.layer_skip]
    assert lab.engines[1].gates == [("varH", 4.0), ("varH", 5.0), ("varH", 6.0)]
    assert [row.arm for row in lab.rows()] == ["baseline", *["layer_skip"] * 3]
    assert [row.speedup for row in lab.rows()] == [1.0, 1.5, 1.5, 1.5]
    assert {row.run_id for row in lab.rows()} == {result.run_id}
    assert len(records.read(lab.folder / "accept.tsv", AcceptRow)[0]) == 3
    assert result.exit_code == 0
    assert lab.live == 0


def test_draft_weights_need_an_engine_each_and_share_a_baseline(lab):
    kinds = ("shared", "fp8")
    lab.run([RunConfig(draft_weights=kind, gate=VARH, tau_v=tau) for tau in (4.0, 5.0) for kind in kinds])
    assert [engine.cfg.method for engine in lab.engines] == [Method.baseline, Method.layer_skip, Method.layer_skip]
    assert [row.draft_weights for row in lab.rows()] == [None, "shared", "shared", "fp8", "fp8"]


def test_every_row_has_its_provenance(lab):
    lab.run(VARH_SWEEP[:1])
    for row in lab.rows():
        assert {file.name for file in (lab.folder / "runs" / row.key).iterdir()} == {"config.yaml", "run.json"}


def test_points_share_engines_whatever_their_order(lab):
    points = [RunConfig(layer=layer, gate=VARH, tau_v=tau) for tau in (4.0, 5.0) for layer in (2, 6)]
    lab.run(points)
    assert [engine.cfg.layer for engine in lab.engines] == [None, 2, 6]


def test_workloads_share_the_engines_and_each_has_its_own_baseline(lab):
    works = [WorkloadConfig(name=name, input_len=length) for name, length in (("a", 8), ("b", 16))]
    lab.run([RunConfig(workload=work) for work in works])
    assert len(lab.engines) == 2
    assert [(cfg.method.value, cfg.workload.name) for cfg in lab.measured] == [
        ("baseline", "a"), ("baseline", "b"), ("layer_skip", "a"), ("layer_skip", "b"),
    ]  # fmt: skip


def test_models_are_families_of_their_own(lab):
    lab.run([RunConfig(model=ModelConfig(path="/a")), RunConfig(model=ModelConfig(path="/b"))])
    assert [(engine.cfg.model.path, engine.cfg.method.value) for engine in lab.engines] == [
        ("/a", "baseline"), ("/a", "layer_skip"), ("/b", "baseline"), ("/b", "layer_skip"),
    ]  # fmt: skip


def test_a_failing_point_is_a_row_and_the_sweep_goes_on(lab):
    lab.fail_point = lambda cfg: RuntimeError("out of\nmemory") if cfg.tau_v == 5 and cfg.gate == VARH else None
    result = lab.run(VARH_SWEEP)
    assert [row.status for row in lab.rows()] == ["ok", "ok", "failed: out of memory", "ok"]
    assert result.exit_code == 1
    assert len(lab.engines) == 3  # a fresh engine for the rest: the failure may have broken the first
    assert lab.rows()[2].speedup is None


def test_bad_input_leaves_the_engine_alive_and_exits_with_2(lab):
    lab.fail_point = lambda cfg: SettingsError("no such gate") if cfg.tau_v == 5 and cfg.gate == VARH else None
    result = lab.run(VARH_SWEEP)
    assert len(lab.engines) == 2
    assert result.exit_code == 2
    assert len(result.failed) == 1


def test_an_engine_that_does_not_start_fails_all_its_points_and_only_them(lab):
    lab.fail_open = lambda cfg: RuntimeError("no") if cfg.layer == 2 else None
    result = lab.run([RunConfig(layer=layer, gate=VARH, tau_v=tau) for layer in (2, 6) for tau in (4.0, 5.0)])
    assert [row.status for row in lab.rows()] == ["ok", "failed: no", "failed: no", "ok", "ok"]
    assert result.exit_code == 1


def test_without_a_baseline_no_candidate_is_measured(lab):
    lab.fail_open = lambda cfg: ConfigError("bad model")
    result = lab.run(VARH_SWEEP)
    assert len(lab.engines) == 1
    assert [row.status for row in lab.rows()] == [
        "failed: bad model", *["failed: its baseline failed: bad model"] * 3,
    ]  # fmt: skip
    assert result.exit_code == 2
    for row in lab.rows():
        assert {file.name for file in (lab.folder / "runs" / row.key).iterdir()} == {"config.yaml", "run.json"}


def test_an_engine_that_does_not_close_is_a_warning(lab):
    lab.fail_close = lambda cfg: RuntimeError("stuck") if cfg.method is Method.layer_skip else None
    result = lab.run(VARH_SWEEP)
    assert result.exit_code == 0
    assert result.warnings == ["closing an engine: stuck"]


def test_a_rerun_of_what_is_finished_opens_no_engine(lab):
    lab.run(VARH_SWEEP)
    before = lab.rows()
    result = lab.run(VARH_SWEEP)
    assert len(lab.engines) == 2
    assert (result.skipped, result.rows, result.exit_code) == (3, [], 0)
    assert lab.rows() == before
    lab.run(VARH_SWEEP, again=True)
    assert len(lab.engines) == 4


def test_what_remains_is_measured_against_a_baseline_of_its_own_run(lab):
    lab.fail_point = lambda cfg: RuntimeError("no") if cfg.tau_v == 6 and cfg.gate == VARH else None
    lab.run(VARH_SWEEP)
    lab.fail_point = lambda cfg: None
    result = lab.run(VARH_SWEEP)
    assert [row.arm for row in result.rows] == ["baseline", "layer_skip"]
    assert {row.run_id for row in result.rows} == {result.run_id}
    assert result.rows[1].threshold == 6
    assert result.skipped == 2


def test_an_interrupt_passes_through_and_keeps_the_rows(lab):
    def interrupt(cfg):
        if cfg.tau_v == 5 and cfg.gate == VARH:
            raise KeyboardInterrupt
        return None

    lab.fail_point = interrupt
    with pytest.raises(KeyboardInterrupt):
        lab.run(VARH_SWEEP)
    assert [row.status for row in lab.rows()] == ["ok", "ok"]
    assert lab.live == 0
    lab.fail_point = lambda cfg: None
    assert len(lab.run(VARH_SWEEP).rows) == 3  # baseline, 5, 6


def test_a_baseline_alone_needs_one_engine(lab):
    lab.run([RunConfig(method=Method.baseline)])
    assert len(lab.engines) == 1
    assert [row.arm for row in lab.rows()] == ["baseline"]


def test_a_results_folder_in_use_is_refused(lab):
    with records.sweep_lock(lab.folder), pytest.raises(ConfigError, match="pid"):
        lab.run(VARH_SWEEP)
    assert lab.engines == []


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("name", ["summary.csv", "accept.tsv"])
def test_a_file_with_another_header_is_refused_before_any_engine(lab, name, again):
    (lab.folder / name).write_text("other\nrow\n")
    with pytest.raises(ConfigError, match=r"another header(.|\n)*results_dir=NAME"):
        lab.run(VARH_SWEEP, again=again)
    assert lab.engines == []
    assert (lab.folder / name).read_text() == "other\nrow\n"


@pytest.mark.parametrize("again", [True, False])
def test_a_folder_of_an_earlier_version_goes_on(lab, again):
    lab.run(VARH_SWEEP[:1])
    summary = lab.folder / "summary.csv"
    lines = [line.split(",") for line in summary.read_text().splitlines()]
    place = lines[0].index("verification")
    summary.write_text("".join(",".join(line[:place] + line[place + 1 :]) + "\n" for line in lines))
    before = lab.rows()
    result = lab.run(VARH_SWEEP, again=again)
    assert (result.skipped, len(result.rows)) == ((0, 4) if again else (1, 3))
    assert lab.rows() == [*before, *result.rows]
    assert summary.read_text().splitlines()[0].split(",") == records.header(Record)


def test_the_row_that_marks_a_point_as_finished_comes_last(lab, monkeypatch):
    append = records.append

    def interrupted(path, row):
        if path.name == "summary.csv" and row.arm == "layer_skip":
            raise KeyboardInterrupt
        append(path, row)

    with monkeypatch.context() as patched:
        patched.setattr(records, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lab.run(VARH_SWEEP[:1])
    result = lab.run(VARH_SWEEP[:1])
    assert [row.arm for row in result.rows] == ["baseline", "layer_skip"]
    accepts = records.read(lab.folder / "accept.tsv", AcceptRow)[0]
    assert [row.run_id for row in accepts][1:] == [result.run_id]  # the one before belongs to no row of the summary
    assert accepts[0].run_id not in {row.run_id for row in lab.rows() if row.arm == "layer_skip"}


def test_a_sweep_writes_to_one_folder():
    with pytest.raises(ConfigError, match="a,b"):
        sweep.results_dir([RunConfig(results_dir="a"), RunConfig(results_dir="b")])


def test_a_tracker_gets_every_row_and_its_failure_is_a_warning(lab):
    class Broken(Tracker):
        seen = 0

        def log(self, record):
            self.seen += 1
            raise OSError("no network")

    tracker = Broken()
    result = lab.run(VARH_SWEEP, tracker=tracker)
    assert tracker.seen == 4
    assert result.exit_code == 0
    assert "no network" in result.warnings[0]


class Charts(Tracker):
    def __init__(self):
        self.seen = []

    def chart(self, png):
        self.seen.append(png.read_bytes()[:4])


WANDB = TrackerConfig(kind=TrackerKind.wandb)


def test_a_tracker_gets_the_chart_of_all_rows_of_the_folder(lab, monkeypatch):
    drawn, draw = [], figure.draw
    monkeypatch.setattr(figure, "draw", lambda rows, *words, **more: drawn.append(rows) or draw(rows, *words, **more))
    tracker = Charts()
    lab.run(VARH_SWEEP[:1], tracker=tracker)
    assert tracker.seen == drawn == []  # no tracker was asked for
    lab.run([replace(cfg, tracker=WANDB) for cfg in VARH_SWEEP], tracker=tracker)
    assert tracker.seen == [b"\x89PNG"]
    assert drawn == [lab.rows()]
    assert {row.threshold for row in drawn[0]} == {None, 4, 5, 6}


def test_a_chart_that_cannot_be_drawn_or_sent_is_a_warning(lab, monkeypatch):
    class Broken(Tracker):
        def chart(self, png):
            raise OSError("no network")

    cfgs = [replace(cfg, tracker=WANDB) for cfg in VARH_SWEEP]
    sent = lab.run(cfgs, tracker=Broken())
    monkeypatch.setattr(figure, "draw", lambda *_, **__: 1 / 0)
    drawn = lab.run(cfgs, tracker=Broken(), again=True)
    assert (sent.exit_code, sent.warnings) == (0, ["chart: no network"])
    assert (drawn.exit_code, drawn.warnings) == (0, ["chart: division by zero"])


def test_points_that_rows_call_the_same_are_told_apart_by_their_settings():
    eager, half = EngineConfig(device="cpu", enforce_eager=True), ModelConfig(dtype="bfloat16")
    cfgs = [RunConfig(), RunConfig(engine=eager), RunConfig(model=half), RunConfig(gate=VARH)]
    told = sweep.told_apart(cfgs)
    assert [told[run_key(cfg)] for cfg in cfgs] == [
        "model.dtype=float32 engine.enforce_eager=False",
        "model.dtype=float32 engine.enforce_eager=True",
        "model.dtype=bfloat16 engine.enforce_eager=False",
        "",
    ]
    extra = [RunConfig(engine=EngineConfig(device="cpu", extra=more)) for more in ({}, {"block_size": 32})]
    assert list(sweep.told_apart(extra).values()) == ["engine.extra.block_size=null", "engine.extra.block_size=32"]


def test_progress_counts_to_the_end(lab):
    seen = []
    lab.run(VARH_SWEEP, progress=lambda what, done, total: seen.append((what, done, total)))
    assert seen == [("points", number, 4) for number in (1, 2, 3, 4)]


def test_the_plan_counts_engines():
    plan = sweep.plan([*VARH_SWEEP, RunConfig(engine=EngineConfig(enforce_eager=True))])
    assert plan.engines == 4
    assert sweep.plan([]).engines == 0
