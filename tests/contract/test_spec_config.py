"""From vLLM's arguments to our settings: called twice, from the command line, with a pinned and overridden model."""

import ast
import copy
import inspect
import json
import logging
import os
import pickle
import re
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from first_lines import INDEX, README, of_kind, python_blocks
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM
from vllm.config import ModelConfig, ParallelConfig
from vllm.config import speculative as theirs
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.metrics import loggers
from vllm.v1.spec_decode import metrics
from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

from selfspec_cli.config import speculative
from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.facts import model_facts
from selfspec_cli.config.paths import model_path
from selfspec_cli.early_exit.artifact import save_head
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.head_metadata import HeadMetadata
from selfspec_cli.early_exit.head_module import ExitHead
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.vllm_plugin import compile_cache, register, target_facts, vllm_names
from selfspec_cli.vllm_plugin.spec_config import collects, settings_of
from selfspec_cli.vllm_plugin.target_facts import bits_of, linear_parameters


@pytest.fixture
def said(monkeypatch):
    """What our logger says, by level; vLLM sets its handlers up anew as it likes, so caplog would not see all of it."""
    lines = {"info": [], "warning": []}
    for level, own in lines.items():
        monkeypatch.setattr(
            logging.getLogger("vllm.selfspec"), level, lambda text, *words, own=own: own.append(text % words)
        )
    return SimpleNamespace(**lines)


def parsed(folder, *words):
    """What vLLM's command line makes of these words."""
    register()
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(["--skip-tokenizer-init", "--model", str(folder), *words]))


def test_a_second_engine_from_the_same_arguments_drafts_early_too(folder):
    """Before, the second call found vLLM's own draft_model in them, with the whole target as its draft."""
    spec = {"method": "layer_skip", "layer_skip": 2, "gate": "maxp"}
    register()
    args = EngineArgs(str(folder), skip_tokenizer_init=True, speculative_config=dict(spec))
    settings = [settings_of(args.create_engine_config()) for _ in range(2)]
    assert settings[0] == settings[1]
    assert settings[0].layer == 2
    assert args.speculative_config == spec


def test_layer_skip_of_0_is_an_engine_without_speculation(folder, said):
    spec = {"method": "layer_skip", "layer_skip": 0, "num_speculative_tokens": 3}
    register()
    args = EngineArgs(str(folder), skip_tokenizer_init=True, speculative_config=dict(spec))
    config = args.create_engine_config()
    assert config.speculative_config is None
    assert settings_of(config) is None
    assert args.speculative_config == spec
    assert said.warning == ["layer_skip = 0: early exit is off, the engine runs plain vLLM"]
    args = parsed(folder, "--spec-method", "layer_skip", "-sc", '{"layer-skip": 0}')
    assert args.create_engine_config().speculative_config is None


def test_a_gate_on_a_head_without_a_scale_is_warned_of(configured, tmp_path, said):
    head, metadata = ExitHead("lsq", {"weight": torch.zeros(512, 64)}), HeadMetadata("lsq", 2, 64, 512)
    file = str(save_head(tmp_path / "heads" / "layer2_lsq.safetensors", head, metadata))
    for gate, expected in (("maxp", 1), ("none", 0)):
        said.warning.clear()
        configured({"method": "layer_skip", "layer_skip": 2, "gate": gate, "head_path": file})
        assert sum("reads a distribution" in line for line in said.warning) == expected


def test_a_strict_engine_refuses_what_another_warns_of(configured):
    def start(**more):
        return configured({"method": "layer_skip", "layer_skip": 2, "gate": "maxp", "tau": 0.0, **more})

    with pytest.raises(SettingsError, match="strict = True, and early exit warns: gate 'maxp' with tau = 0 never"):
        start(strict=True)
    assert not settings_of(start()).strict
    assert settings_of(start(strict=True, tau=0.3)).strict
    start()  # the one before it was strict


def test_the_draft_is_configured_as_its_target_is(configured, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    overrides = {"num_hidden_layers": 6, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}}
    config = configured(
        {"method": "layer_skip"},
        hf_overrides=overrides,
        revision="abc",
        code_revision="def",
        tokenizer=str(tmp_path / "tokenizer"),
        trust_remote_code=True,
    )
    target, draft = config.model_config, config.speculative_config.draft_model_config
    assert (settings_of(config).layer, settings_of(config).draft_weights) == (6, "int4")  # copies of all layers
    assert draft.hf_config.to_dict() == target.hf_config.to_dict()
    assert target.hf_config.num_hidden_layers == 6
    for name in ("revision", "code_revision", "tokenizer", "trust_remote_code", "max_model_len"):
        assert getattr(draft, name) == getattr(target, name), name
    assert config.speculative_config.target_model_config is target
    pickle.dumps(config)  # it travels to the workers


def test_the_options_of_vllms_command_line_are_understood(folder):
    args = parsed(folder, "--spec-method", "layer_skip", "--spec-tokens", "3")
    for config in (args.create_engine_config(), args.create_engine_config()):
        assert settings_of(config).k == config.speculative_config.num_speculative_tokens == 3
    more = '{"gate": "maxp", "tau": 0.2}'
    args = parsed(folder, "--spec-method", "layer_skip", "--speculative-config", more)
    assert settings_of(args.create_engine_config()).threshold == 0.2


def test_one_setting_in_two_places_is_refused(folder):
    spec = '{"method": "layer_skip", "num_speculative_tokens": 4}'
    args = parsed(folder, "--speculative-config", spec, "--spec-tokens", "3")
    with pytest.raises(SettingsError, match=r"num_speculative_tokens = 4 .* 3 by an option"):
        args.create_engine_config()
    args = parsed(folder, "--spec-method", "layer_skip", "--spec-model", "other")
    with pytest.raises(SettingsError, match="model = 'other' has no meaning"):
        args.create_engine_config()


def test_vllms_own_settings_still_work(configured):
    """Keys that are vLLM's, dashes instead of underscores, and the defaults: copies of all layers, twelve tokens."""
    config = configured({"method": "layer_skip", "draft-sample-method": "probabilistic"})
    settings = settings_of(config)
    assert (settings.layer, settings.k) == (8, 12)
    assert config.speculative_config.draft_sample_method == settings.draft_sample_method == "probabilistic"
    assert config.speculative_config.num_speculative_tokens == settings.width


@pytest.mark.parametrize("spec", [None, {"method": "ngram", "num_speculative_tokens": 3}], ids=["plain", "ngram"])
def test_an_engine_without_our_method_has_none_of_our_settings(configured, spec):
    config = configured(spec)
    assert settings_of(config) is None
    assert collects(config) == ()
    assert not config.parallel_config.worker_extension_cls
    assert "selfspec" not in str(config.additional_config)
    assert config.speculative_config is None if spec is None else config.speculative_config.method == "ngram"


def test_a_model_that_drafts_would_spoil_is_refused(configured, monkeypatch):
    monkeypatch.setattr(ModelConfig, "is_hybrid", property(lambda self: True))
    with pytest.raises(SettingsError, match="recurrent state"):
        configured({"method": "layer_skip"})


MTP_LAYER = {"num_nextn_predict_layers": 1, "architectures": ["MiMoForCausalLM"]}


@pytest.mark.parametrize(("name", "changes"), [("eagle-like", {}), ("llama", MTP_LAYER)], ids=["name", "architecture"])
def test_a_model_that_vllm_takes_for_another_draft_is_its_own(configured, folder, tmp_path, name, changes):
    """vLLM guesses a draft's method from its name (EAGLE) and its architecture (MTP), whatever method was given."""
    other = tmp_path / name
    other.mkdir()
    (other / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | changes))
    config = configured({"method": "layer_skip"}, model=str(other))
    spec = config.speculative_config
    assert spec.method == "draft_model" and spec.uses_draft_model() and not spec.use_eagle()
    assert spec.draft_model_config.architectures == config.model_config.architectures
    assert spec.num_speculative_tokens == settings_of(config).k


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"gate": "maxp"}, "drafting with layers 0 to 2 of 8, gate maxp at 0.35, up to 4 tokens"),
        ({"draft_weights": "int8"}, "drafting with layers 0 to 2 of 8, int8 copies of their weights, no gate"),
        ({"draft_weights": "none", "free_drafts": 6}, "drafting by prompt lookup of up to 6 tokens alone, no gate"),
    ],
)
def test_the_log_says_what_the_engine_does_and_no_draft_model(configured, said, more, words):
    config = configured({"method": "layer_skip", "layer_skip": 3, "num_speculative_tokens": 4, **more})
    assert sum(words in line for line in said.info) == 1
    travelled = pickle.loads(pickle.dumps(config))
    for one in (config, copy.deepcopy(config), travelled):
        assert f"speculative_config=EarlyExit({words}" in str(one)
        assert "draft_model" not in repr(one.speculative_config)
    assert settings_of(travelled) == settings_of(config)


def test_skip_says_that_its_output_is_another(configured, said):
    configured({"method": "skip", "layer_skip": 2})
    assert any("decoding with layers 0 to 1 of 8 alone, without verification" in line for line in said.info)


def test_only_early_exit_on_a_cpu_leaves_the_artifacts_out(configured, monkeypatch):
    monkeypatch.delenv(compile_cache.VARIABLE, raising=False)
    configured()
    assert compile_cache.VARIABLE not in os.environ
    configured({"method": "layer_skip"})
    assert os.environ[compile_cache.VARIABLE] == "0"
    monkeypatch.setenv(compile_cache.VARIABLE, "1")
    configured({"method": "layer_skip"})
    assert os.environ[compile_cache.VARIABLE] == "1"


# ---- What is read from vLLM's source about a speculative_config is what vLLM itself says once it is imported


def _flat(words: tuple[Any, ...]) -> list[str]:
    return [word for one in words for word in ([one] if isinstance(one, str) else _flat(get_args(one)))]


def test_methods_and_keys_are_vllms():
    known = speculative.known_to_vllm()
    assert known is not None
    methods, keys = known
    assert sorted(methods) == sorted(set(_flat(get_args(theirs.SpeculativeMethod))))
    assert {field.name for field in fields(theirs.SpeculativeConfig)} - set(keys) == set(speculative._SET_BY_VLLM)
    assert set(speculative.DRAFTERS) <= set(methods)
    assert set(speculative.NOT_ON_CPU) <= set(methods)


def test_suffix_decoding_comes_from_the_package_that_is_looked_for():
    assert f"from {speculative.SUFFIX_PACKAGE}.suffix_decoding import" in inspect.getsource(SuffixDecodingProposer)


# ---- The packaged shapes without weights are configs that vLLM reads as the models that they represent


def test_the_shape_of_llama_4_scout_has_its_parameters_in_4_bits():
    words = ["model=llama4_scout_shape", "perplexity_tokens=0", "workload.prompts=random"]
    (cfg,) = compose_runs(None, words, sweep=False)
    facts = model_facts(cfg)
    assert (facts.layers, facts.hidden, facts.is_moe, facts.quantization) == (48, 5120, True, "compressed-tensors")
    found = ModelConfig(model_path(cfg.model), skip_tokenizer_init=True, dtype=cfg.model.dtype, max_model_len=8192)
    assert found.architectures == ["Llama4ForCausalLM"] and found.quantization == "compressed-tensors"
    text = found.hf_text_config
    assert [text.num_local_experts, text.num_experts_per_tok, len(text.moe_layers)] == [16, 1, 48]
    assert text.layer_types[:4] == ["chunked_attention"] * 3 + ["full_attention"]
    expert = 3 * text.hidden_size * text.intermediate_size
    attention = 2 * text.hidden_size * (text.num_attention_heads + text.num_key_value_heads) * text.head_dim
    words_ = 2 * text.vocab_size * text.hidden_size
    # 109 B with the parts that see, of which 17 B are active: one expert of 16, and the shared one.
    assert 48 * (17 * expert + attention) + words_ == pytest.approx(108e9, rel=0.01)
    assert 48 * (2 * expert + attention) + words_ == pytest.approx(17e9, rel=0.02)
    scheme = CompressedTensorsConfig.from_config(text.quantization_config)
    weights = scheme.target_scheme_map["Linear"]["weights"]
    assert (weights.num_bits, weights.group_size, weights.symmetric) == (4, 128, True)
    assert scheme.ignore == ["re:.*lm_head", "re:.*self_attn", "re:.*router"]


# ---- The pages' lines for vLLM, read by vLLM's own parsers


SERVE = of_kind("vllm", README, INDEX)


@pytest.mark.parametrize("words", SERVE, ids=" ".join)
def test_vllms_parser_reads_the_line_that_serves(words):
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words[2:])
    validate_parsed_serve_args(arguments)
    assert arguments.model_tag == "MODEL"
    settings = ResolvedSettings.from_user(arguments.speculative_config, 32)
    assert settings.method == "layer_skip"


def test_the_keys_in_python_are_of_vllms_class_and_ours():
    calls = [
        node
        for block in python_blocks(README, INDEX)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LLM"
    ]
    assert calls
    known = {*inspect.signature(LLM.__init__).parameters, *inspect.signature(EngineArgs).parameters}
    for call in calls:
        given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        assert given.keys() <= known
        ResolvedSettings.from_user(given["speculative_config"], 32)


def test_the_metrics_to_watch_are_vllms():
    named = [name for words in of_kind("curl", INDEX) for name in re.findall(r"\w{6,}", " ".join(words))]
    wanted = [name for name in named if name.startswith(("spec_decode", "num_requests"))]
    assert len(wanted) == 2
    source = inspect.getsource(loggers) + inspect.getsource(metrics)
    for name in wanted:
        assert f"vllm:{name.rstrip('_')}" in source


# ---- what the choice of a draft asks of the target: vLLM's own configurations, without an engine ---------------------


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
SIZES |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def facts(tmp_path, monkeypatch):
    """The facts of a Llama with these keys in its config.json. memory: bytes of a GPU; None: there is none."""

    def found(memory=None, ranks=1, engine=None, **config):
        LlamaConfig(architectures=["LlamaForCausalLM"], dtype="float32", **SIZES | config).save_pretrained(tmp_path)
        args = EngineArgs(str(tmp_path), skip_tokenizer_init=True, **engine or {})
        model = args.create_model_config()
        parallel = ParallelConfig()
        parallel.tensor_parallel_size = ranks
        with monkeypatch.context() as patch:
            if memory is not None:
                gpu = SimpleNamespace(is_cuda=lambda: True, get_device_total_memory=lambda: memory)
                patch.setattr(vllm_names, "current_platform", gpu)
                patch.setattr("selfspec_cli.vllm_plugin.target_facts.facts_of", lambda *_: None)
            return target_facts.target_of(args, model, parallel)

    return found


def test_an_ordinary_target_on_a_cpu(facts):
    found = facts(engine={"max_num_seqs": 8})
    layers = LlamaForCausalLM(LlamaConfig(**SIZES)).model.layers
    assert found.parameters == sum(weight.numel() for weight in layers.parameters() if weight.dim() == 2)
    assert (found.bits, found.exit_layer, found.left, found.memory) == (16, None, None, None)
    assert found.logits == 8 * 64
    assert (found.weights.device, found.weights.quantization) == ("cpu", "")


def test_the_memory_that_the_weights_leave_of_what_vllm_may_use(facts):
    found = facts(memory=10**6, engine={"gpu_memory_utilization": 0.5})
    assert found.memory == 10**6
    assert found.left == 0.5 * 10**6 - 2 * found.parameters - 4 * 64 * 32
    sized = facts(memory=10**6, engine={"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 10**5})
    assert sized.left == 10**6 - 10**5 - 2 * found.parameters - 4 * 64 * 32
    two = facts(memory=10**6, ranks=2, engine={"gpu_memory_utilization": 0.5})
    assert two.parameters == found.parameters / 2 and two.left > found.left


@pytest.mark.parametrize(("value", "layer"), [(2, 2), (None, None), (0, None), (True, None), ("2", None)])
def test_a_layer_that_the_checkpoint_was_trained_to_exit_after(facts, value, layer):
    assert facts(early_exit_layer=value).exit_layer == layer


def scheme(bits, others):
    """Of compressed-tensors: weights have these bits, activations and caches have others."""
    other = {"num_bits": others}
    group = {"input_activations": other, "weights": {"num_bits": bits}, "output_activations": other}
    return {"config_groups": {"group_0": group}, "kv_cache_scheme": other}


@pytest.mark.parametrize(
    ("method", "config", "bits"),
    [
        (None, None, 16),
        ("fp8", {"quant_method": "fp8", "activation_scheme": "dynamic"}, 8),
        ("awq", {"w_bit": 4, "q_group_size": 128}, 4),
        ("gptq", {"bits": 3, "group_size": 128}, 3),
        ("gguf", None, 4),
        ("bitsandbytes", {"load_in_4bit": True}, 4),
        ("mxfp4", None, 4),
        ("compressed-tensors", scheme(4, others=16), 4),
        ("compressed-tensors", scheme(8, others=4), 8),
    ],
)
def test_bits_of_the_weights(method, config, bits):
    assert bits_of(method, config) == bits


def test_the_parameters_of_a_mixture_are_those_of_all_its_experts():
    config = SimpleNamespace(**SIZES, num_local_experts=4)
    dense = linear_parameters(SimpleNamespace(**SIZES))
    experts = 3 * 32 * 48 * 3
    assert linear_parameters(config) == dense + 3 * experts
    config.moe_intermediate_size = 24
    assert linear_parameters(config) == dense + experts
