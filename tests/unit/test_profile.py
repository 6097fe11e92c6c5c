"""`selfspec profile`: what it keeps, what it shows, and the command line for Nsight Systems."""

import gzip
import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from commands import call, document, model_folder
from points import BASELINE, baseline
from test_trace import CPU

from selfspec_cli.commands import profile as shown
from selfspec_cli.config.keys import run_key
from selfspec_cli.config.schema import Method, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.engine import profiling
from selfspec_cli.record import folder, profiles
from selfspec_cli.report import figures, make, sources
from selfspec_cli.stages import profile as stage

ORIGIN = 1_790_857_026_000_000_000


def made(key="0", run_id="20261122-000000-aaaa", **more):
    fields = {
        "key": key * 12,
        "run_id": run_id,
        "time": "2026-11-22T00:00:00+0000",
        "device": "a machine",
        "arm": BASELINE,
        "seconds": {"verify": 0.6, "sampler": 0.1, "other": 0.1, "idle": 0.2},
        "wall": 1.0,
        "rounds": 10,
        "tokens": 10,
        "tok_s": 12.0,
        "tok_s_profiled": 10.0,
        "memory_rate": None,
        "gpu": False,
        "unknown": [],
        "kernels": [{"name": "aten::mm", "part": "verify", "seconds": 0.5, "calls": 20, "bytes": 10**9, "rate": None}],
        "trace": "x.trace.json.gz",
    }
    return profiles.Profile(**fields | more)


def test_the_newest_profile_of_a_key_is_the_one_that_is_shown(tmp_path):
    folder.save_profile(tmp_path, made(run_id="20261121-000000-aaaa", seconds={"verify": 1.0}), b"old")
    folder.save_profile(tmp_path, made(), b"new")
    (found,) = profiles.newest(tmp_path).values()
    shares = found.columns()
    assert [shares[f"{name}_share"] for name in ("verify", "sampler", "idle")] == [0.6, 0.1, pytest.approx(0.3)]
    assert shares["trunk_share"] is None  # the baseline drafts nothing: empty, not 0
    assert (tmp_path / "profiles" / "x.trace.json.gz").read_bytes() == b"new"


def test_every_part_has_its_share():
    assert {part for parts in profiles.SHARES.values() for part in parts} == set(shown.PARTS)


def test_files_that_hold_no_profile_are_left_alone(tmp_path):
    folder.save(tmp_path, baseline())
    folder.save_profile(tmp_path, made(), b"")
    (tmp_path / "profiles" / "torn.json").write_text('{"format": 1, "key"')
    (tmp_path / "profiles" / "other.json").write_text('{"format": 99}')
    assert list(profiles.newest(tmp_path)) == ["0" * 12]


@pytest.mark.slow
def test_the_page_has_a_bar_for_each_profile(tmp_path):
    folder.save(tmp_path, baseline())
    folder.save_profile(tmp_path, made(), b"")
    (figure,) = [one for one in figures.of_sources(sources.read(tmp_path)) if one.name == "profile"]
    (panel,) = figure.panels
    assert sum(row["share"] for row in panel.data) == pytest.approx(1.0)
    assert [row["text"] for row in panel.data if row["text"]] == ["12.0 tok/s"]


@pytest.mark.slow
def test_a_tracker_gets_the_picture_of_a_profile_from_a_folder_without_points(tmp_path):
    folder.save_profile(tmp_path / "results", made(), b"")
    (picture,) = make.pictures(tmp_path / "results", tmp_path / "pictures")
    assert picture.name == "profile.png" and picture.read_bytes().startswith(b"\x89PNG")


def test_what_is_shown_adds_up_and_says_what_is_not_known(capsys):
    shown.show(made(unknown=[stage.NO_RATE]), {"profile": "p.json"})
    printed = capsys.readouterr()
    assert "verify" in printed.out and "60.0%" in printed.out and "100.0%" in printed.out and "2.0" in printed.out
    assert "rate of this machine is not known" in printed.err
    shown.show(made(wall=0.8), {})
    assert "125.0% of the wall time" in capsys.readouterr().err


class Engine:
    """An engine without vLLM: every run takes the given seconds, and the traces are those of test_trace.py."""

    layer = None

    def __init__(self, cfg, seconds):
        self.cfg, self.seconds = cfg, seconds
        self.llm = SimpleNamespace(model_config=SimpleNamespace(skip_tokenizer_init=False))

    def call(self, method):
        if method == "early_exit_counters":
            return None
        assert method == "early_exit_about"
        return {"weights": {"full": [64]}, "memory_rate": None, "device": "cpu", "captured": False}

    def generate(self, prompts, length, **more):
        assert more["detokenize"] and len(prompts) == more["batch"] == 1
        return SimpleNamespace(outputs=[[0] * length], seconds=self.seconds, tokens_per_second=9.0)


@pytest.mark.parametrize(("seconds", "accounted"), [(100e-6, 1.0), (80e-6, 1.25), (125e-6, 0.8)])
def test_one_arm_is_profiled_and_kept(tmp_path, monkeypatch, seconds, accounted):
    """Its run has steps for 100 us of the 120 that were recorded: the sum tells a clock of the run that disagrees."""
    cfg = RunConfig(
        method=Method.baseline,
        results_dir=str(tmp_path),
        model=ModelConfig(path="reference"),
        workload=WorkloadConfig(name="short", num_prompts=4, batch=1, output_len=128),
    )

    def record(engine, prompts, length, scratch, **more):
        file = scratch / "engine.json.gz"
        file.write_bytes(gzip.compress(json.dumps({"baseTimeNanoseconds": ORIGIN, "traceEvents": CPU}).encode()))
        generation = engine.generate(prompts, length, batch=1, detokenize=True)
        return profiling.Recording(file, None, ORIGIN, generation)

    @contextmanager
    def open_engine(config):
        yield Engine(config, seconds)

    monkeypatch.setattr(profiling, "record", record)
    monkeypatch.setattr(profiling, "annotate", lambda engine: [])
    monkeypatch.setattr(stage, "workload_prompts", lambda cfg, engine: [[1]] * 4)
    found, path = stage.run(cfg, open_engine=open_engine)
    assert found.tokens == stage.TOKENS and found.key == run_key(cfg)
    assert found.accounted == pytest.approx(accounted) and found.unknown == [stage.NO_RATE]
    assert found.kernels[0] == {
        "name": "aten::addmm",
        "part": "verify",
        "seconds": pytest.approx(20e-6),
        "calls": 1,
        "bytes": 64,
        "rate": None,
    }
    assert profiles.newest(tmp_path)[found.key].name == path.stem == found.name
    events = json.loads(gzip.decompress((path.parent / found.trace).read_bytes()))["traceEvents"]
    track = [event for event in events if event.get("cat") == "part"]
    assert sum(event["dur"] for event in track) == pytest.approx(100)


def test_nsight_is_asked_for_the_range_that_the_worker_opens(tmp_path):
    command = stage.nsight_command(["python", "-m", "selfspec_cli", "profile", "--under-nsight"], tmp_path / "x")
    assert command[:2] == ["nsys", "profile"] and command[-5:] == [
        "python",
        "-m",
        "selfspec_cli",
        "profile",
        "--under-nsight",
    ]
    assert {"--capture-range=cudaProfilerApi", "--cuda-graph-trace=node", f"--output={tmp_path / 'x'}"} <= set(command)


def test_a_dry_run_names_the_arm_and_the_command_of_nsight(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "model", num_hidden_layers=8, max_position_embeddings=1024)
    words = ("profile", "layer=3", "model=./model", "--tokens", "32", "--nsys", "--dry-run", "--json")
    plan = document(call(*words))
    assert plan["tokens"] == 32 and "E=3" in plan["arm"]
    assert plan["nsight"].startswith("nsys profile") and plan["nsight"].endswith("--tokens 32 --under-nsight")
    assert "layer=3" in plan["nsight"]
    refused = call("profile", "layer=3", "model=./model", "--nsys")
    assert refused.exit_code == 2 and "--nsys" in refused.stderr
