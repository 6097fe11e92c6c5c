"""Values that mean nothing are refused; keys and digests: what is written anew is measured anew."""

import ast
import importlib.util
import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exit_heads import lsq_head
from safetensors.torch import save_file

from selfspec_cli.config import keys, model_files, schema
from selfspec_cli.config.keys import Keys, baseline_of, digests, engine_key, file_digest, method_settings, run_key
from selfspec_cli.config.model_files import head_folder, model_fingerprint
from selfspec_cli.config.schema import ConfigError, EngineConfig, GateConfig, HeadConfig, Method, RunConfig, Runner
from selfspec_cli.config.validation import validate
from selfspec_cli.early_exit.artifact import HeadMetadata, save_head
from selfspec_cli.early_exit.settings import OPTIONS
from selfspec_cli.record.tables import identity

VARH = GateConfig(kind="varH")
MAXP = GateConfig(kind="maxp")
GPU = EngineConfig(device="cuda")
DUMMY = schema.ModelConfig(load_format="dummy")
RANDOM = {"perplexity_tokens": 0, "workload": schema.WorkloadConfig(prompts="random")}
FP8 = RunConfig(draft_weights="fp8", engine=GPU)
NGRAM = {"method": Method.vllm, "speculative": {"method": "ngram"}}
DRAWN = RunConfig(draft_sample_method="probabilistic")


@pytest.mark.parametrize(
    ("cfg", "named"),
    [
        (RunConfig(k=0), "k=0"),
        (RunConfig(gate=MAXP, threshold=1.01), "threshold = 1.01 is out of range for gate 'maxp'"),
        (RunConfig(layer=0), "layer=0"),
        (RunConfig(repeats=2), "repeats=2"),
        (RunConfig(vocab="half"), "vocab=half"),
        (RunConfig(gate=VARH, threshold=math.inf), "threshold = inf must be a finite number"),
        (RunConfig(workload=schema.WorkloadConfig(batch=16)), "workload.batch=16 with workload.num_prompts=8"),
        (RunConfig(workload=schema.WorkloadConfig(temperature=math.inf)), "workload.temperature=inf: out of range"),
        (RunConfig(model=schema.ModelConfig(dtype="flaot32")), "model.dtype 'flaot32' is not known"),
        (RunConfig(model=schema.ModelConfig(load_format="dumy")), "model.load_format 'dumy' is not known"),
        (RunConfig(model=schema.ModelConfig(max_model_len=-5)), "model.max_model_len=-5: out of range; allowed: 1 or"),
        (RunConfig(engine=EngineConfig(kv_cache_gib=math.inf)), "engine.kv_cache_gib=inf"),
        (RunConfig(runner=Runner.v1, engine=GPU), "runner=v1 with method=layer_skip"),
        (RunConfig(workload=schema.WorkloadConfig(batch=64)), "engine.max_num_seqs=32"),
        (RunConfig(engine=EngineConfig(extra={"pipeline_parallel_size": 2})), "pipeline parallelism"),
        (RunConfig(engine=EngineConfig(kv_cache_gib=0.0)), "engine.kv_cache_gib=0.0"),
        (RunConfig(draft_sample_method="gredy"), "draft_sample_method 'gredy' is not known; allowed: greedy, probabil"),
        (replace(DRAWN, **NGRAM), "use speculative.draft_sample_method=probabilistic"),
    ],
)
def test_values_that_mean_nothing_are_refused_by_name(cfg, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        validate(cfg)


@pytest.mark.parametrize(
    "cfg",
    [
        RunConfig(),
        RunConfig(gate=MAXP, threshold=0),
        RunConfig(gate=MAXP, threshold=1),
        RunConfig(gate=VARH, threshold=0),
        RunConfig(perplexity_tokens=0),
        FP8,
        DRAWN,
        replace(DRAWN, method=Method.draft_model, model=DUMMY, **RANDOM),
        RunConfig(method=Method.vllm, speculative={"method": "ngram", "draft_sample_method": "probabilistic"}),
        RunConfig(workload=schema.WorkloadConfig(batch=8, num_prompts=8)),
        RunConfig(model=schema.ModelConfig(dtype="half", load_format="safetensors", max_model_len=1)),
        RunConfig(runner=Runner.v2, engine=GPU),
        RunConfig(runner=Runner.v2),
        RunConfig(runner=Runner.v1, engine=GPU, method=Method.vllm, speculative={"method": "ngram"}),
        RunConfig(runner=Runner.v2, method=Method.baseline),
    ],
)
def test_the_ends_of_the_ranges_are_allowed(cfg):
    validate(cfg)


@pytest.mark.parametrize(
    ("file", "name", "ours"),
    [
        ("config/model.py", "ModelDType", schema.DTYPES),
        ("model_executor/model_loader/__init__.py", "LoadFormats", schema.LOAD_FORMATS),
        ("config/speculative.py", "DraftSampleMethod", OPTIONS["draft_sample_method"].knob.words()),
    ],
)
def test_the_words_that_are_allowed_are_vllms(file, name, ours):
    vllm = importlib.util.find_spec("vllm")  # read, not imported: that would take seconds
    if vllm is None:
        pytest.skip("vLLM is not installed")
    tree = ast.parse((Path(vllm.submodule_search_locations[0]) / file).read_text())
    assigned = (node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name))
    (value,) = (node.value for node in assigned if node.targets[0].id == name)
    assert set(ast.literal_eval(value.slice)) == set(ours)


def test_a_knob_changes_the_run_key_where_it_has_an_effect():
    assert run_key(RunConfig(threshold=0.1)) == run_key(RunConfig())  # no gate
    assert run_key(RunConfig(gate=VARH, threshold=5.0)) == run_key(RunConfig(gate=VARH))  # its default
    assert run_key(RunConfig(results_dir="elsewhere")) == run_key(RunConfig())
    baseline = RunConfig(method=Method.baseline)
    assert run_key(replace(baseline, layer=3, k=2, gate=VARH)) == run_key(baseline)
    skip = RunConfig(method=Method.skip, layer=4)
    assert run_key(replace(skip, k=2, gate=VARH)) == run_key(skip)
    dtype, eager = schema.ModelConfig(dtype="bfloat16"), EngineConfig(enforce_eager=True)
    changed = [RunConfig(gate=VARH), RunConfig(repeats=7), DRAWN, RunConfig(model=dtype), RunConfig(engine=eager)]
    assert len(set(map(run_key, [RunConfig(), *changed]))) == 1 + len(changed)


def test_how_drafts_are_taken_is_in_a_key_only_where_it_is_not_vllms_default_and_something_is_drafted():
    own = {"method": Method.draft_model, "model": DUMMY, **RANDOM}
    assert engine_key(replace(DRAWN, **own)) != engine_key(RunConfig(**own))
    assert "draft_sample_method" not in method_settings(RunConfig()) | method_settings(RunConfig(**own))
    assert method_settings(DRAWN)["draft_sample_method"] == "probabilistic"
    assert baseline_of(DRAWN) == baseline_of(RunConfig())
    assert run_key(replace(DRAWN, method=Method.baseline)) == run_key(RunConfig(method=Method.baseline))
    columns = [identity(cfg).get("draft_sample_method") for cfg in (DRAWN, RunConfig(), replace(DRAWN, **own))]
    assert columns == ["probabilistic", None, "probabilistic"]


def test_the_run_key_is_the_same_tomorrow():
    # Stored in summary.csv: if this changes, finished points are measured again. Change it knowingly.
    assert run_key(RunConfig(model=schema.ModelConfig(hf_overrides={"b": 1, "a": 2}))) == run_key(
        RunConfig(model=schema.ModelConfig(hf_overrides={"a": 2, "b": 1}))
    )
    assert re.fullmatch("[0-9a-f]{12}", run_key(RunConfig()))


def test_gate_workload_and_seed_need_no_other_engine():
    same = engine_key(RunConfig())
    assert engine_key(RunConfig(gate=VARH, threshold=4)) == same
    assert engine_key(RunConfig(workload=schema.WorkloadConfig(input_len=8), seed=3)) == same
    others = {"layer": 4, "k": 3, "head": HeadConfig(kind="lsq"), "draft_weights": "fp8", "method": Method.skip}
    others["model"] = schema.ModelConfig(path="/x")
    assert same not in [engine_key(RunConfig(**{name: value})) for name, value in others.items()]
    assert engine_key(RunConfig(model=DUMMY, seed=1)) != engine_key(RunConfig(model=DUMMY, seed=2))


def test_all_candidates_of_one_workload_share_a_baseline():
    keys = {run_key(baseline_of(RunConfig(layer=layer, gate=VARH, threshold=layer, k=layer))) for layer in (2, 4)}
    assert len(keys) == 1
    assert baseline_of(FP8) == baseline_of(RunConfig(engine=GPU))
    other = baseline_of(RunConfig(workload=schema.WorkloadConfig(batch=4)))
    assert run_key(other) not in keys


def test_the_interpreted_runner_of_a_cpu_has_a_baseline_of_its_own():
    """Its kernels run in Triton's interpreter, the baseline's too; on a GPU vLLM's own choice is the baseline."""
    interpreted, plain = RunConfig(runner=Runner.v2), RunConfig()
    assert baseline_of(interpreted).runner is Runner.v2
    assert run_key(baseline_of(interpreted)) != run_key(baseline_of(plain))
    keys = Keys()  # of one command
    assert keys.baseline(plain)[0] != keys.baseline(interpreted)[0] == run_key(baseline_of(interpreted))
    gpu = RunConfig(runner=Runner.v2, engine=GPU)
    assert run_key(baseline_of(gpu)) == run_key(baseline_of(RunConfig(engine=GPU)))


HIDDEN, VOCAB = 4, 8


@pytest.fixture
def cfg(tmp_path):
    """A model of eight layers in a folder, and heads in another."""
    return replace(model(tmp_path / "model"), head_dir=str(tmp_path / "heads"), layer=4, k=5)


def lsq(cfg, seed):
    """Fit an lsq head for layer 4: the same file, other numbers."""
    torch.manual_seed(seed)
    metadata = HeadMetadata("lsq", 4, HIDDEN, VOCAB)
    return save_head(head_folder(cfg) / "lsq_E4.safetensors", lsq_head(torch.randn(VOCAB, HIDDEN)), metadata)


def test_a_head_that_is_fitted_again_is_measured_again(cfg):
    wanted = replace(cfg, head=HeadConfig("lsq"))
    lsq(cfg, 1)
    first = run_key(wanted)
    assert run_key(wanted) == first
    assert run_key(replace(wanted, head=HeadConfig())) == run_key(replace(cfg, head=HeadConfig()))
    lsq(cfg, 2)
    second = run_key(wanted)
    assert second != first
    assert run_key(baseline_of(wanted)) == run_key(baseline_of(cfg))  # a baseline has no head
    by_path = replace(cfg, head=HeadConfig("lsq", path=str(lsq(cfg, 3))))
    before = run_key(by_path)
    lsq(cfg, 4)
    assert run_key(by_path) != before
    folder = replace(cfg, head=HeadConfig("lsq", path=str(head_folder(cfg))))
    assert digests(folder)["head"] == digests(by_path)["head"]


def test_a_draft_vocabulary_and_a_prompts_file_are_read(cfg, tmp_path):
    file = tmp_path / "file"
    file.write_text("1 2 3")
    for wanted in (replace(cfg, vocab=str(file)), replace(cfg, workload=schema.WorkloadConfig(prompts=str(file)))):
        file.write_text("1 2 3")
        first = run_key(wanted)
        file.write_text("1 2 4 5")
        assert run_key(wanted) != first
    counted = replace(cfg, vocab="4")
    first = run_key(counted)
    head_folder(cfg).mkdir(parents=True)
    (head_folder(cfg) / "token_counts.safetensors").write_text("counts")
    assert run_key(counted) != first


def test_dummy_weights_of_another_seed_are_another_model_whichever_comes_first(cfg):
    """A command uses one Keys object; what that keeps for one seed must not be used for another."""
    dummies = [replace(cfg, model=replace(cfg.model, load_format="dummy"), seed=seed) for seed in (0, 1)]
    alone = [Keys().run(one) for one in dummies]
    together, turned = Keys(), Keys()
    assert [together.run(one) for one in dummies] == alone
    assert [turned.run(one) for one in dummies[::-1]] == alone[::-1]


@pytest.mark.slow
def test_ten_thousand_keys_read_and_hash_what_they_share_once(cfg, monkeypatch):
    seen = []
    read, plain = keys.digests, keys.to_plain
    monkeypatch.setattr(keys, "digests", lambda one: seen.append("digests") or read(one))
    monkeypatch.setattr(keys, "to_plain", lambda one: seen.append("to_plain") or plain(one))
    varied = [
        replace(cfg, model=replace(cfg.model), k=1 + number % 100, gate=GateConfig("maxp"), threshold=number / 10_000)
        for number in range(10_000)
    ]
    of_command = Keys()
    assert len({of_command.run(one) for one in varied}) == 10_000
    assert len({of_command.baseline(one)[0] for one in varied}) == 1
    assert seen.count("digests") == 2  # of the points, and of their baseline
    assert seen.count("to_plain") <= 4  # model, engine, workload, head


def test_a_file_is_read_again_only_when_it_changed(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("one")
    reads = []
    opened = open
    monkeypatch.setattr(keys, "open", lambda *words: reads.append(words[0]) or opened(*words), raising=False)
    first = file_digest(file)
    assert file_digest(file) == first
    assert len(reads) == 1
    os.utime(file, ns=(1, 1))
    assert file_digest(file) == first
    assert len(reads) == 2
    assert file_digest(tmp_path / "gone") is None


# ---- fingerprints of models ----


def model(folder, value=1.0, config=None):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config or {"num_hidden_layers": 8}))
    save_file({"a": torch.full((100_000,), value), "b": torch.zeros(3)}, folder / "model.safetensors")
    return RunConfig(model=schema.ModelConfig(name="M", path=str(folder)))


def test_equal_content_is_one_model_wherever_it_is_and_other_weights_are_another(tmp_path):
    first = model(tmp_path / "orgA" / "M")
    shutil.copytree(tmp_path / "orgA" / "M", tmp_path / "copy")
    copied = replace(first, model=schema.ModelConfig(name="copy", path=str(tmp_path / "copy")))
    other = model(tmp_path / "orgB" / "M", value=1.5)
    deeper = model(tmp_path / "orgC" / "M", config={"num_hidden_layers": 5})
    assert model_fingerprint(copied) == model_fingerprint(first)
    assert len({model_fingerprint(cfg) for cfg in (first, other, deeper)}) == 3


def test_a_model_that_is_written_anew_is_read_anew(tmp_path, monkeypatch):
    cfg = model(tmp_path / "M")
    before = model_fingerprint(cfg)
    with monkeypatch.context() as patched:
        patched.setattr(model_files, "_pieces", None)  # unchanged: no byte of the weights is read a second time
        assert model_fingerprint(cfg) == before
    file = tmp_path / "M" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # the last byte of the last tensor
    file.write_bytes(content)
    os.utime(file, ns=(1, 1))
    assert model_fingerprint(cfg) != before


def test_dummy_weights_are_their_config_and_their_seed(tmp_path):
    cfg = model(tmp_path / "M")
    dummy = replace(cfg, model=replace(cfg.model, load_format="dummy"))
    shorter = replace(dummy, model=replace(dummy.model, hf_overrides={"num_hidden_layers": 2}))
    assert len({model_fingerprint(one) for one in (cfg, dummy, replace(dummy, seed=1), shorter)}) == 4
    assert model_fingerprint(replace(cfg, seed=1)) == model_fingerprint(cfg)
    before = model_fingerprint(dummy)
    (tmp_path / "M" / "model.safetensors").write_bytes(b"others")
    assert model_fingerprint(dummy) == before


def test_a_model_of_the_hub_is_its_commit(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    cfg = RunConfig(model=schema.ModelConfig(name="M", path="org-of-nobody/M"))
    cached = tmp_path / "snapshots" / ("a" * 40) / "config.json"
    unknown = model_fingerprint(cfg)
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_, **__: str(cached))
    known = model_fingerprint(cfg)
    pinned = model_fingerprint(replace(cfg, model=replace(cfg.model, path="org-of-nobody/N")))
    assert len({unknown, known, pinned}) == 3


@pytest.mark.parametrize(
    "content", [b"\xff" * 100, b"version https://git-lfs.github.com/spec/v1", b"\x02" + b"\0" * 7 + b"[]"]
)
def test_what_is_no_safetensors_file_still_has_a_name(tmp_path, content):
    cfg = model(tmp_path / "M")
    (tmp_path / "M" / "model.safetensors").write_bytes(content)
    (tmp_path / "M" / "config.json").write_text("{")
    before = model_fingerprint(cfg)
    (tmp_path / "M" / "model.safetensors").write_bytes(content + b"1")
    assert model_fingerprint(cfg) != before
