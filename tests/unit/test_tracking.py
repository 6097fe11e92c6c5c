import sys
from types import SimpleNamespace

import pytest

from selfspec_cli.config.schema import ConfigError, RunConfig, TrackerConfig, TrackerKind
from selfspec_cli.record.tables import Record, header
from selfspec_cli.record.tracking import open_tracker

ROW = Record(run_id="r", time="t", arm="baseline", model="m", tok_s_median=100.0, key="0" * 12)
WANDB = RunConfig(k=5, tracker=TrackerConfig(kind=TrackerKind.wandb))


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for wandb that keeps what it is given."""
    seen = SimpleNamespace(init=None, logged=[], finished=False)
    run = SimpleNamespace(log=seen.logged.append, finish=lambda: setattr(seen, "finished", True))

    def init(**options):
        seen.init = options
        return run

    fake = SimpleNamespace(
        init=init,
        Settings=lambda **options: options,
        Table=lambda columns, data: {"columns": columns, "data": data},
        Image=lambda path: f"image {path}",
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    return seen


def test_rows_and_chart_go_to_wandb(wandb, tmp_path):
    with open_tracker(WANDB, "run-1") as tracker:
        tracker.log(ROW)
        tracker.chart(tmp_path / "chart.png")
    assert wandb.logged[0] == {"tok_s_median": 100.0}  # what was not measured is not logged as anything
    assert wandb.logged[1]["rows"]["columns"] == header(Record)
    assert wandb.logged[1]["rows"]["data"][0][0] == "r"
    assert wandb.logged[1]["chart"].endswith("chart.png")
    assert wandb.finished
    assert wandb.init["config"]["k"] == 5


@pytest.mark.parametrize(
    ("env", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "x"}, "online"),
        ({"WANDB_API_KEY": "x", "WANDB_MODE": "disabled"}, "disabled"),
    ],
)
def test_without_a_key_wandb_is_offline(wandb, monkeypatch, env, mode):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with open_tracker(WANDB, "run-1"):
        pass
    assert wandb.init["mode"] == mode


def test_the_run_is_closed_when_the_sweep_fails(wandb):
    with pytest.raises(RuntimeError), open_tracker(WANDB, "run-1"):
        raise RuntimeError
    assert wandb.finished


def test_a_run_that_cannot_be_closed_is_a_warning(wandb, monkeypatch, capsys):
    def finish():
        raise OSError("no network")

    monkeypatch.setattr(sys.modules["wandb"], "init", lambda **_: SimpleNamespace(finish=finish))
    with open_tracker(WANDB, "run-1"):
        pass
    assert capsys.readouterr().err == "warning: tracker: no network\n"
    with pytest.raises(RuntimeError, match="mine"), open_tracker(WANDB, "run-1"):
        raise RuntimeError("mine")


def test_no_tracker_imports_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would fail
    with open_tracker(RunConfig(), "run-1") as tracker:
        tracker.log(ROW)
    with pytest.raises(ConfigError, match="pip install"), open_tracker(WANDB, "run-1"):
        pass
