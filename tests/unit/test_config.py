import ast
import importlib.util
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from selfspec_cli.config.keys import Keys, baseline_of, engine_key, method_settings, run_key
from selfspec_cli.config.schema import (
    DTYPES,
    LOAD_FORMATS,
    ConfigError,
    EngineConfig,
    GateConfig,
    HeadConfig,
    Method,
    ModelConfig,
    RunConfig,
    Runner,
    WorkloadConfig,
    gate_threshold,
)
from selfspec_cli.config.validation import validate
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.settings import OPTIONS
from selfspec_cli.record.tables import identity

KINDS = [kind for kind in GATES if kind not in ("none", "auto")]
VARH = GateConfig(kind="varH")
MAXP = GateConfig(kind="maxp")
GPU = EngineConfig(device="cuda")
DUMMY = ModelConfig(load_format="dummy")
RANDOM = {"perplexity_tokens": 0, "workload": WorkloadConfig(prompts="random")}
FP8 = RunConfig(draft_weights="fp8", engine=GPU)
NGRAM = {"method": Method.vllm, "speculative": {"method": "ngram"}}
DRAWN = RunConfig(draft_sample_method="probabilistic")


@pytest.mark.parametrize(
    ("cfg", "named"),
    [
        (RunConfig(k=0), "k=0"),
        (
            RunConfig(gate=MAXP, threshold=1.01),
            "threshold = 1.01 is out of range for gate 'maxp'; allowed: from 0 to 1",
        ),
        (RunConfig(layer=0), "layer=0"),
        (RunConfig(repeats=2), "repeats=2"),
        (RunConfig(vocab="half"), "vocab=half"),
        (RunConfig(gate=VARH, threshold=math.inf), "threshold = inf must be a finite number"),
        (RunConfig(workload=WorkloadConfig(batch=16)), "workload.batch=16 with workload.num_prompts=8"),
        (RunConfig(workload=WorkloadConfig(temperature=math.inf)), "workload.temperature=inf: out of range"),
        (RunConfig(model=ModelConfig(dtype="flaot32")), "model.dtype 'flaot32' is not known"),
        (RunConfig(model=ModelConfig(load_format="dumy")), "model.load_format 'dumy' is not known"),
        (RunConfig(model=ModelConfig(max_model_len=-5)), "model.max_model_len=-5: out of range; allowed: 1 or more"),
        (RunConfig(engine=EngineConfig(kv_cache_gib=math.inf)), "engine.kv_cache_gib=inf"),
        (RunConfig(runner=Runner.v1, engine=GPU), "runner=v1 with method=layer_skip"),
        (RunConfig(workload=WorkloadConfig(batch=64)), "engine.max_num_seqs=32"),
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
        RunConfig(workload=WorkloadConfig(batch=8, num_prompts=8)),
        RunConfig(model=ModelConfig(dtype="half", load_format="safetensors", max_model_len=1)),
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
        ("config/model.py", "ModelDType", DTYPES),
        ("model_executor/model_loader/__init__.py", "LoadFormats", LOAD_FORMATS),
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


def test_a_knob_without_effect_does_not_change_the_run_key():
    assert run_key(RunConfig(threshold=0.1)) == run_key(RunConfig())  # no gate
    assert run_key(RunConfig(gate=VARH, threshold=5.0)) == run_key(RunConfig(gate=VARH))  # its default
    assert run_key(RunConfig(results_dir="elsewhere")) == run_key(RunConfig())
    baseline = RunConfig(method=Method.baseline)
    assert run_key(replace(baseline, layer=3, k=2, gate=VARH)) == run_key(baseline)
    skip = RunConfig(method=Method.skip, layer=4)
    assert run_key(replace(skip, k=2, gate=VARH)) == run_key(skip)


@pytest.mark.parametrize(
    "change",
    [
        {"k": 3},
        {"gate": VARH},
        {"repeats": 7},
        {"draft_weights": "fp8"},
        {"draft_sample_method": "probabilistic"},
        {"method": Method.skip},
        {"head": HeadConfig(kind="lsq")},
        {"model": ModelConfig(dtype="bfloat16")},
        {"engine": EngineConfig(enforce_eager=True)},
    ],
)
def test_a_knob_with_effect_changes_the_run_key(change):
    assert run_key(replace(RunConfig(), **change)) != run_key(RunConfig())


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
    assert run_key(RunConfig(model=ModelConfig(hf_overrides={"b": 1, "a": 2}))) == run_key(
        RunConfig(model=ModelConfig(hf_overrides={"a": 2, "b": 1}))
    )
    assert re.fullmatch("[0-9a-f]{12}", run_key(RunConfig()))


def test_gate_workload_and_seed_need_no_other_engine():
    same = engine_key(RunConfig())
    assert engine_key(RunConfig(gate=VARH, threshold=4)) == same
    assert engine_key(RunConfig(workload=WorkloadConfig(input_len=8), seed=3)) == same
    for other in (
        RunConfig(layer=4),
        RunConfig(k=3),
        RunConfig(head=HeadConfig(kind="lsq")),
        RunConfig(draft_weights="fp8"),
        RunConfig(model=ModelConfig(path="/x")),
        RunConfig(method=Method.skip),
    ):
        assert engine_key(other) != same
    assert engine_key(RunConfig(model=DUMMY, seed=1)) != engine_key(RunConfig(model=DUMMY, seed=2))


def test_all_candidates_of_one_workload_share_a_baseline():
    keys = {run_key(baseline_of(RunConfig(layer=layer, gate=VARH, threshold=layer, k=layer))) for layer in (2, 4)}
    assert len(keys) == 1
    assert baseline_of(FP8) == baseline_of(RunConfig(engine=GPU))
    other = baseline_of(RunConfig(workload=WorkloadConfig(batch=4)))
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_threshold_is_read_by_every_gate(kind):
    assert gate_threshold(RunConfig(gate=GateConfig(kind), threshold=0.25)) == 0.25
    assert gate_threshold(RunConfig(gate=GateConfig(kind))) == GATES[kind].default
