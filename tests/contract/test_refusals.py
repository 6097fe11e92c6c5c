"""Refusals and limits that no table holds: by release, by runner, by the context that fits the KV cache."""

from types import SimpleNamespace

import pytest
import torch
import vllm.triton_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, RSWASpec

from selfspec_cli.early_exit.contexts import Context
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.vllm_plugin import releases, spec_config
from selfspec_cli.vllm_plugin.interpreted import interpret_kernels
from selfspec_cli.vllm_plugin.refusals import refuse_context
from selfspec_cli.vllm_plugin.v1.proposer import _EarlyExit
from selfspec_cli.vllm_plugin.v2 import speculator

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(("release", "allowed"), [("0.32.0", False), ("0.33.0", True)])
def test_keys_that_only_one_release_has_are_allowed_on_that_one(monkeypatch, release, allowed):
    monkeypatch.setattr(releases, "installed", lambda: ("vllm", f"{release}+cu130"))
    assert ("fly_window_size" in spec_config.vllm_keys()) is allowed


def test_only_early_exit_is_refused_on_the_v2_runner_of_another_device(monkeypatch):
    monkeypatch.setattr(speculator, "settings_of", lambda config: object())
    init = speculator.init_with_early_exit(lambda *args: "vLLM's own")
    with pytest.raises(SettingsError, match="early exit is not supported on xpu"):
        init(None, torch.device("xpu"), None)
    monkeypatch.setattr(speculator, "settings_of", lambda config: None)
    assert init(None, torch.device("xpu"), None) == "vLLM's own"


@pytest.mark.parametrize("narrow", ["sliding_window", "attention_chunk_size", "rswa_window"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_window_is_refused_if_any_layer_of_a_kv_cache_group_has_one_of_its_own(narrow, place):
    """Without vLLM's hybrid KV cache manager, layers of both kinds share one KV cache group."""
    kind, sizes = (RSWASpec if narrow == "rswa_window" else FullAttentionSpec), {"num_kv_heads": 1, "head_size": 32}
    specs = [FullAttentionSpec(block_size=16, dtype=torch.float32, **sizes)] * 2
    groups = [SimpleNamespace(kv_cache_group_id=0, kv_cache_spec=spec) for spec in specs]
    refuse_context(Context("window", (64,)), groups)
    groups[place].kv_cache_spec = kind(block_size=16, dtype=torch.float32, **sizes, **{narrow: 128})
    refuse_context(Context(), groups)
    with pytest.raises(SettingsError, match="draft_window = 64 is not supported for this model"):
        refuse_context(Context("window", (64,)), groups)


def config_of(length: int) -> SimpleNamespace:
    return SimpleNamespace(model_config=SimpleNamespace(max_model_len=length))


def test_the_v1_proposer_drafts_up_to_the_context_that_the_kv_cache_was_made_for():
    """`max_model_len=auto`: the worker learns the shorter context after the proposer was made and loaded."""
    proposer = SimpleNamespace(
        vllm_config=config_of(100),
        max_model_len=4096,
        num_speculative_tokens=5,
        _find_groups=lambda: None,
        runner=SimpleNamespace(effective_drafter_max_model_len=4096),
    )
    _EarlyExit.initialize_attn_backend(proposer, None)
    assert proposer._last_useful == 99
    assert proposer.runner.effective_drafter_max_model_len == 105


def test_the_v2_speculator_drafts_up_to_the_context_that_the_kv_cache_was_made_for():
    """vLLM 0.32 keeps the length that the speculator was made with; its slots would be of other requests."""
    ours = SimpleNamespace(
        vllm_config=config_of(100),
        max_model_len=4096,
        _find_groups=lambda: None,
        state=SimpleNamespace(max_model_len=4096),
    )
    speculator.EarlyExitSpeculator.set_attn(ours, None, None, None, None, None)
    assert ours.state.max_model_len == 100


def test_a_process_that_imported_vllm_without_triton_cannot_have_the_v2_runner_of_a_cpu_any_more():
    """vLLM looks for a backend once; other tests have it imported here."""
    assert not vllm.triton_utils.HAS_TRITON
    with pytest.raises(SettingsError, match="needs a process that has not imported vLLM or Triton"):
        interpret_kernels()
