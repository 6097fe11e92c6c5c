"""`selfspec profile`: where the time goes, on small traces; what it keeps, and what it shows."""

import gzip
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import call, document, model_folder
from points import baseline, profile

from selfspec_cli.commands import profile as shown
from selfspec_cli.config.keys import run_key
from selfspec_cli.config.schema import Method, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.record import folder, quality
from selfspec_cli.report import figures, make, sources
from selfspec_cli.stages import profile as stage


def annotation(name, ts, dur):
    return {"ph": "X", "cat": "user_annotation", "name": f"selfspec.{name}", "ts": ts, "dur": dur}


def launch(correlation, ts, name="cudaLaunchKernel"):
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": ts, "dur": 1, "args": {"correlation": correlation}}


def kernel(correlation, ts, dur, name="nvjet_tst"):
    args = {"correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": args}


def microseconds(found):
    return {part: round(1e6 * seconds) for part, seconds in found["seconds"].items()}


CPU = [
    annotation("schedule", 5, 10),
    annotation("verify", 15, 40),
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 17, "dur": 5},
    {"ph": "M", "name": "process_name"},
    annotation("logits", 50, 5),
    annotation("sample", 55, 30),
    annotation("draft", 60, 20),
    annotation("gate", 62, 16),
    annotation("trunk", 63, 7),
    annotation("head", 70, 5),
    annotation("detokenise", 90, 6),
]


def test_on_the_cpu_each_moment_is_that_of_the_innermost_range():
    found = stage.breakdown(CPU)
    parts = {"trunk": 7, "head": 5, "gate": 16 - 12, "draft": 4, "verify": 40, "sampler": 10, "scheduler": 10}
    assert microseconds(found) == parts | {"detokenise": 6, "idle": 5}
    assert (found["rounds"], found["gpu"], found["wall"]) == (1, False, pytest.approx(91e-6))


GPU = [
    annotation("schedule", 0, 3),
    annotation("verify", 3, 7),
    launch(1, 5, "cudaGraphLaunch"),
    kernel(1, 20, 30),
    kernel(1, 55, 15),  # nothing waits for the host inside a graph
    annotation("sample", 10, 30),
    launch(2, 12),
    kernel(2, 70, 5),
    annotation("draft", 20, 10),
    launch(3, 25),
    kernel(3, 75, 40, "_begin_round"),  # inside `sample`
    launch(4, 60),
    kernel(4, 105, 20, "memcpy"),  # in no range, and ten beside the draft on another stream
    annotation("schedule", 130, 20),
    kernel(2, 200, 50),  # after the last range
]


def test_on_a_gpu_each_moment_is_that_of_the_kernel_or_else_of_the_host():
    found = stage.breakdown([event for event in GPU if event["ts"] < 200])
    parts = {"verify": 50, "sampler": 5, "draft": 40, "scheduler": 3 + 20, "other": 10, "host": 17, "idle": 5}
    assert microseconds(found) == parts
    assert found["gpu"] and sum(parts.values()) == 150 == round(1e6 * found["wall"])
    assert sum(microseconds(stage.breakdown(GPU)).values()) == 150


@pytest.mark.parametrize("known", [True, False])
def test_a_loop_inside_a_graph_counts_whole_though_the_profiler_sees_one_pass(known):
    """A kernel of the graph at 60, and the last of three passes at 90; the launch of the pass may not be known."""
    events = [
        annotation("verify", 0, 10),
        launch(1, 5),
        kernel(1, 10, 40),
        annotation("draft", 20, 10),
        launch(2, 22, "cudaGraphLaunch"),
        kernel(2, 60, 2, "set_condition"),
        launch(3, 25),
        kernel(3, 70, 2, "memcpy"),  # on another stream
        kernel(2 if known else 99, 90, 10, "_end_step"),
        annotation("schedule", 40, 70),
    ]
    assert microseconds(stage.breakdown(events)) == {"verify": 40, "draft": 40, "scheduler": 20, "host": 10}


def test_a_trace_without_ranges_is_refused():
    with pytest.raises(ValueError, match="no range of a verify pass"):
        stage.breakdown([launch(1, 0), kernel(1, 1, 1)])


def test_the_newest_profile_of_a_key_is_shown_and_other_files_are_left_alone(tmp_path):
    folder.save_profile(tmp_path, profile(run_id="20261121-000000-aaaa", seconds={"verify": 1.0}), b"old")
    folder.save_profile(tmp_path, profile(), b"new")
    (tmp_path / "profiles" / "torn.json").write_text('{"format": 1, "key"')
    (tmp_path / "profiles" / "other.json").write_text('{"format": 99}')
    (found,) = quality.newest_profiles(tmp_path).values()
    assert found == profile()
    assert (tmp_path / "profiles" / "x.trace.json.gz").read_bytes() == b"new"


@pytest.mark.slow
def test_a_profile_is_a_bar_and_a_picture_also_without_points(tmp_path):
    folder.save_profile(tmp_path, profile(), b"")
    (picture,) = make.pictures(tmp_path, tmp_path / "pictures")
    assert picture.name == "profile.png" and picture.read_bytes().startswith(b"\x89PNG")
    folder.save(tmp_path, baseline())
    (figure,) = [one for one in figures.of_sources(sources.read(tmp_path)) if one.name == "profile"]
    (panel,) = figure.panels
    assert sum(row["share"] for row in panel.data) == pytest.approx(1.0)
    assert [row["text"] for row in panel.data if row["text"]] == ["12.0 tok/s"]


def test_shares_and_kernels_are_shown(capsys):
    shown.show(profile(), {"profile": "p.json"})
    printed = capsys.readouterr()
    assert "verify" in printed.out and "60.0%" in printed.out and "50.0%" in printed.out and "2.0" in printed.out


def test_one_arm_is_profiled_and_kept(tmp_path, monkeypatch):
    cfg = RunConfig(
        method=Method.baseline,
        results_dir=str(tmp_path),
        model=ModelConfig(path="reference"),
        workload=WorkloadConfig(name="short", num_prompts=4, batch=1, output_len=128),
    )
    kernels = [{"name": "aten::mm", "seconds": 5e-6, "calls": 1}]
    packed = gzip.compress(json.dumps({"traceEvents": CPU}).encode())

    def call(method, *words):
        if method == "early_exit_profile_stop":
            Path(*words).write_bytes(packed)
            return kernels
        assert method == "early_exit_profile_start"
        return None

    def generate(prompts, length, **more):
        assert more["detokenize"] and len(prompts) == more["batch"] == 1
        return SimpleNamespace(outputs=[[0] * length], tokens_per_second=9.0)

    llm = SimpleNamespace(model_config=SimpleNamespace(skip_tokenizer_init=False))
    engine = SimpleNamespace(layer=None, llm=llm, call=call, generate=generate)
    monkeypatch.setattr(stage, "workload_prompts", lambda cfg, engine: [[1]] * 4)
    found, path = stage.run(cfg, open_engine=lambda config: nullcontext(engine), tokens=64)
    assert found.tokens == 64 and found.key == run_key(cfg)
    assert sum(found.seconds.values()) == pytest.approx(found.wall) and found.kernels == kernels
    assert quality.newest_profiles(tmp_path)[found.key].name == path.stem == found.name
    assert (path.parent / found.trace).read_bytes() == packed


def test_a_dry_run_names_the_arm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "model", num_hidden_layers=8, max_position_embeddings=1024)
    plan = document(call("profile", "layer=3", "model=./model", "--tokens", "32", "--dry-run", "--json"))
    assert plan["tokens"] == 32 and "E=3" in plan["arm"]
