"""From vLLM's arguments to our settings: called twice, from the command line, with a pinned and overridden model."""

import copy
import json
import logging
import os
import pickle

import pytest
import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from selfspec_cli.early_exit.artifact import save_head
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.head_metadata import HeadMetadata
from selfspec_cli.early_exit.head_module import ExitHead
from selfspec_cli.vllm_plugin import compile_cache, register
from selfspec_cli.vllm_plugin.described import LOADING, RUNNERS, SharesWeights
from selfspec_cli.vllm_plugin.spec_config import settings_of

pytestmark = pytest.mark.contract

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
CONFIG |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG |= {"num_hidden_layers": 8, "vocab_size": 512, "max_position_embeddings": 256}


@pytest.fixture
def path(tmp_path):
    """A model without weights: nothing here loads any."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


@pytest.fixture
def arguments():
    register()
    return AsyncEngineArgs


@pytest.fixture
def warned(monkeypatch):
    """What our logger warns of; vLLM sets its handlers up anew as it likes, so caplog would not see all of it."""
    lines = []
    monkeypatch.setattr(logging.getLogger("vllm.selfspec"), "warning", lambda text, *words: lines.append(text % words))
    return lines


def parsed(arguments, *words):
    parser = arguments.add_cli_args(FlexibleArgumentParser())
    return arguments.from_cli_args(parser.parse_args(["--skip-tokenizer-init", *words]))


def test_a_second_engine_from_the_same_arguments_drafts_early_too(arguments, path):
    """Before, the second call found vLLM's own draft_model in them, with the whole target as its draft."""
    spec = {"method": "layer_skip", "layer_skip": 2, "gate": "maxp"}
    args = arguments(model=path, skip_tokenizer_init=True, speculative_config=dict(spec))
    settings = [settings_of(args.create_engine_config()) for _ in range(2)]
    assert settings[0] == settings[1]
    assert settings[0].layer == 2
    assert args.speculative_config == spec


def test_skip_is_understood_twice_too(arguments, path):
    args = arguments(model=path, skip_tokenizer_init=True, speculative_config={"method": "skip", "layer_skip": 2})
    for config in (args.create_engine_config(), args.create_engine_config()):
        assert config.speculative_config is None
        assert not settings_of(config).verify


def test_layer_skip_of_0_is_an_engine_without_speculation(arguments, path, warned):
    spec = {"method": "layer_skip", "layer_skip": 0, "num_speculative_tokens": 3}
    args = arguments(model=path, skip_tokenizer_init=True, speculative_config=dict(spec))
    config = args.create_engine_config()
    assert config.speculative_config is None
    assert settings_of(config) is None
    assert args.speculative_config == spec
    assert warned == ["layer_skip = 0: early exit is off, the engine runs plain vLLM"]
    args = parsed(arguments, "--model", path, "--spec-method", "layer_skip", "-sc", '{"layer-skip": 0}')
    assert args.create_engine_config().speculative_config is None


def test_a_gate_on_a_head_without_a_scale_is_warned_of(arguments, path, tmp_path, warned):
    head, metadata = ExitHead("lsq", {"weight": torch.zeros(512, 64)}), HeadMetadata("lsq", 2, 64, 512)
    file = str(save_head(tmp_path / "heads" / "layer2_lsq.safetensors", head, metadata))
    for gate, expected in (("maxp", 1), ("none", 0)):
        spec = {"method": "layer_skip", "layer_skip": 2, "gate": gate, "head_path": file}
        warned.clear()
        arguments(model=path, skip_tokenizer_init=True, speculative_config=spec).create_engine_config()
        assert sum("reads a distribution" in line for line in warned) == expected


def test_a_strict_engine_refuses_what_another_warns_of(arguments, path):
    def start(**more):
        spec = {"method": "layer_skip", "layer_skip": 2, "gate": "maxp", "tau": 0.0, **more}
        return arguments(model=path, skip_tokenizer_init=True, speculative_config=spec).create_engine_config()

    with pytest.raises(SettingsError, match="strict = True, and early exit warns: gate 'maxp' with tau = 0 never"):
        start(strict=True)
    assert not settings_of(start()).strict
    assert settings_of(start(strict=True, tau=0.3)).strict
    start()  # the one before it was strict


def test_the_draft_is_configured_as_its_target_is(arguments, path, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    overrides = {"num_hidden_layers": 6, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}}
    args = arguments(
        model=path,
        skip_tokenizer_init=True,
        hf_overrides=overrides,
        revision="abc",
        code_revision="def",
        tokenizer=str(tmp_path / "tokenizer"),
        trust_remote_code=True,
        speculative_config={"method": "layer_skip"},
    )
    config = args.create_engine_config()
    target, draft = config.model_config, config.speculative_config.draft_model_config
    assert (settings_of(config).layer, settings_of(config).draft_weights) == (6, "int4")  # copies of all layers
    assert draft.hf_config.to_dict() == target.hf_config.to_dict()
    assert target.hf_config.num_hidden_layers == 6
    for name in ("revision", "code_revision", "tokenizer", "trust_remote_code", "max_model_len"):
        assert getattr(draft, name) == getattr(target, name), name
    assert config.speculative_config.target_model_config is target
    pickle.dumps(config)  # it travels to the workers


def test_the_options_of_vllms_command_line_are_understood(arguments, path):
    args = parsed(arguments, "--model", path, "--spec-method", "layer_skip", "--spec-tokens", "3")
    for config in (args.create_engine_config(), args.create_engine_config()):
        assert settings_of(config).k == config.speculative_config.num_speculative_tokens == 3
    more = '{"gate": "maxp", "tau": 0.2}'
    args = parsed(arguments, "--model", path, "--spec-method", "layer_skip", "--speculative-config", more)
    assert settings_of(args.create_engine_config()).threshold == 0.2


def test_one_setting_in_two_places_is_refused(arguments, path):
    spec = '{"method": "layer_skip", "num_speculative_tokens": 4}'
    args = parsed(arguments, "--model", path, "--speculative-config", spec, "--spec-tokens", "3")
    with pytest.raises(SettingsError, match=r"num_speculative_tokens = 4 .* 3 by an option"):
        args.create_engine_config()
    args = parsed(arguments, "--model", path, "--spec-method", "layer_skip", "--spec-model", "other")
    with pytest.raises(SettingsError, match="model = 'other' has no meaning"):
        args.create_engine_config()


MTP_LAYER = {"num_nextn_predict_layers": 1, "architectures": ["MiMoForCausalLM"]}


@pytest.mark.parametrize(("name", "changes"), [("eagle-like", {}), ("llama", MTP_LAYER)], ids=["name", "architecture"])
def test_a_model_that_vllm_takes_for_another_draft_is_its_own(arguments, tmp_path, name, changes):
    """vLLM guesses a draft's method from its name (EAGLE) and its architecture (MTP), whatever method was given."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    args = arguments(model=str(folder), skip_tokenizer_init=True, speculative_config={"method": "layer_skip"})
    config = args.create_engine_config()
    spec = config.speculative_config
    assert spec.method == "draft_model" and spec.uses_draft_model() and not spec.use_eagle()
    assert spec.draft_model_config.architectures == config.model_config.architectures
    assert spec.num_speculative_tokens == settings_of(config).k


def test_other_methods_stay_vllms(arguments, path):
    args = parsed(arguments, "--model", path, "--spec-method", "ngram", "--spec-tokens", "3")
    config = args.create_engine_config()
    assert settings_of(config) is None
    assert config.speculative_config.method == "ngram"


@pytest.fixture
def said(monkeypatch):
    """What is said through our logger below vLLM's, whatever its level; vLLM sets its handlers up anew as it likes."""
    lines = []
    logger = logging.getLogger("vllm.selfspec")
    monkeypatch.setattr(logger, "info", lambda text, *words: lines.append(text % words))
    return lines


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"gate": "maxp"}, "drafting with layers 0 to 2 of 8, gate maxp at 0.35, up to 4 tokens"),
        ({}, "drafting with layers 0 to 2 of 8, no gate, up to 4 tokens"),
        ({"draft_weights": "int8"}, "drafting with layers 0 to 2 of 8, int8 copies of their weights, no gate"),
        ({"layer_skip": 1, "num_speculative_tokens": 1}, "drafting with layer 0 of 8, no gate, 1 token"),
    ],
)
def test_the_log_says_what_the_engine_does_and_no_draft_model(arguments, path, said, more, words):
    spec = {"method": "layer_skip", "layer_skip": 3, "num_speculative_tokens": 4, **more}
    config = arguments(model=path, skip_tokenizer_init=True, speculative_config=spec).create_engine_config()
    assert sum(words in line for line in said) == 1
    travelled = pickle.loads(pickle.dumps(config))
    for one in (config, copy.deepcopy(config), travelled):
        assert f"speculative_config=EarlyExit({words}" in str(one)
        assert "draft_model" not in repr(one.speculative_config)
    assert settings_of(travelled) == settings_of(config)


def test_skip_says_that_its_output_is_another(arguments, path, said):
    args = arguments(model=path, skip_tokenizer_init=True, speculative_config={"method": "skip", "layer_skip": 2})
    args.create_engine_config()
    assert any("decoding with layers 0 to 1 of 8 alone, without verification" in line for line in said)


def test_only_early_exit_on_a_cpu_leaves_the_artifacts_out(arguments, path, monkeypatch):
    monkeypatch.delenv(compile_cache.VARIABLE, raising=False)
    args = {"model": path, "skip_tokenizer_init": True}
    arguments(**args).create_engine_config()
    assert compile_cache.VARIABLE not in os.environ
    arguments(**args, speculative_config={"method": "layer_skip"}).create_engine_config()
    assert os.environ[compile_cache.VARIABLE] == "0"
    monkeypatch.setenv(compile_cache.VARIABLE, "1")
    arguments(**args, speculative_config={"method": "layer_skip"}).create_engine_config()
    assert os.environ[compile_cache.VARIABLE] == "1"


def test_a_runner_that_loads_another_drafter_later_says_so():
    def logged():
        record = logging.makeLogRecord({"msg": LOADING})
        logging.getLogger(RUNNERS[0]).filter(record)
        return record.getMessage()

    shares = SharesWeights()
    shares.on()
    assert logged() == "The draft shares the model's weights and KV cache: there is no drafter to load"
    shares.off()
    assert logged() == LOADING
