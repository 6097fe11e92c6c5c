"""Every refusal names the value, why, and what to do instead; what differs by release is allowed by release."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.vllm_plugin import spec_config, versions

pytestmark = pytest.mark.contract

ONES = dict.fromkeys(spec_config.ONE_ONLY, 1)
PLAIN = ONES | {"enable_lora": False, "watermark_config": None, "offload_group_size": 0, "offload_backend": "uva"}
ENGINES = {
    "pipeline_parallel_size": (2, "tensor_parallel_size splits the model over GPUs instead"),
    "data_parallel_size": (4, "start one server for each GPU"),
    "prefill_context_parallel_size": (2, "use tensor_parallel_size"),
    "decode_context_parallel_size": (2, "use tensor_parallel_size"),
    "enable_lora": (True, "with the adapter merged into the model's weights"),
    "watermark_config": ({"key": 1}, "serve watermarked text without a speculative_config"),
    "offload_group_size": (4, "allowed: cpu_offload_gb"),
}


def test_arguments_that_early_exit_takes_are_taken():
    spec_config._refuse_engine(SimpleNamespace(**PLAIN))


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_cannot_draft_is_refused_with_what_to_do_instead(name):
    value, instead = ENGINES[name]
    with pytest.raises(SettingsError, match=instead) as refused:
        spec_config._refuse_engine(SimpleNamespace(**PLAIN | {name: value}))
    assert name in str(refused.value)


def test_the_arguments_that_are_refused_are_vllms_own():
    from vllm.engine.arg_utils import EngineArgs

    plain = {field.name: field.default for field in dataclasses.fields(EngineArgs)}
    assert {name: plain[name] for name in ONES} == ONES
    assert set(PLAIN) <= set(plain)


@pytest.mark.parametrize("fact", ["is_hybrid", "is_attention_free", "uses_mrope"])
def test_a_model_that_cannot_draft_is_refused_with_what_to_do_instead(fact):
    facts = {"is_hybrid": False, "is_attention_free": False, "uses_mrope": False} | {fact: True}
    with pytest.raises(SettingsError, match="without a speculative_config, or with vLLM's method 'ngram'"):
        spec_config._refuse_model(SimpleNamespace(model="m", **facts))


@pytest.mark.parametrize(("release", "allowed"), [("0.32.0", False), ("0.33.0", True)])
def test_keys_that_only_one_release_has_are_allowed_on_that_one(monkeypatch, release, allowed):
    monkeypatch.setattr(versions, "installed", lambda: ("vllm", f"{release}+cu130"))
    assert ("fly_window_size" in spec_config.vllm_keys()) is allowed


def test_the_v2_runner_on_a_cpu_is_refused(monkeypatch):
    from selfspec_cli.vllm_plugin.v2 import speculator

    monkeypatch.setattr(speculator, "settings_of", lambda config: object())
    init = speculator.init_with_early_exit(lambda *args: "vLLM's own")
    with pytest.raises(SettingsError, match="unset VLLM_USE_V2_MODEL_RUNNER=1"):
        init(None, torch.device("cpu"), None)
    monkeypatch.setattr(speculator, "settings_of", lambda config: None)
    assert init(None, torch.device("cpu"), None) == "vLLM's own"


def config_of(length: int) -> SimpleNamespace:
    return SimpleNamespace(model_config=SimpleNamespace(max_model_len=length))


def test_the_v1_proposer_drafts_up_to_the_context_that_the_kv_cache_was_made_for():
    """`max_model_len=auto`: the worker learns the shorter context after the proposer was made and loaded."""
    from selfspec_cli.vllm_plugin.v1.proposer import _EarlyExit

    group = SimpleNamespace(layer_names=["a"], kv_cache_group_id=0)
    proposer = SimpleNamespace(
        vllm_config=config_of(100), max_model_len=4096, num_speculative_tokens=5, _layer_names={"a"},
        runner=SimpleNamespace(attn_groups=[[group]], effective_drafter_max_model_len=4096),
    )  # fmt: skip
    _EarlyExit.initialize_attn_backend(proposer, None)
    assert proposer._last_useful == 99
    assert proposer.runner.effective_drafter_max_model_len == 105


def test_the_v2_speculator_drafts_up_to_the_context_that_the_kv_cache_was_made_for(monkeypatch):
    """vLLM 0.32 keeps the length that the speculator was made with; its slots would be of other requests."""
    from selfspec_cli.vllm_plugin.v2 import speculator

    monkeypatch.setattr(speculator, "init_attn_backend", lambda *args, **kwargs: ([], None, None))
    ours = SimpleNamespace(
        vllm_config=config_of(100), max_model_len=4096, device="cpu", _layer_names=set(),
        state=SimpleNamespace(max_model_len=4096), _configure_decode_metadata_update=lambda: None,
    )  # fmt: skip
    speculator.EarlyExitSpeculator.set_attn(ours, None, None, None, None, None)
    assert ours.state.max_model_len == 100
