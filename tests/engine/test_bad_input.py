"""What cannot be done is refused before an engine starts, in one sentence that names the value and what is allowed."""

from typing import Any

import pytest
from harness import greedy, layer_skip, live
from models import LAYERS
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.vllm_plugin.spec_config import collects, settings_of

pytestmark = pytest.mark.engine

# Changes to a good speculative_config -> what the message says; tests/unit/test_early_exit_messages.py has the others.
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "E of L": ({"layer_skip": LAYERS}, f"layer_skip = {LAYERS} is out of range; allowed: 1 to {LAYERS - 1}"),
    "another draft model": ({"model": "other/draft"}, "model = 'other/draft' has no meaning for method 'layer_skip'"),
    "vLLM's key with skip": (
        {"method": "skip", "draft_sample_method": "probabilistic"},
        "draft_sample_method = 'probabilistic' has no meaning for method 'skip'.*allowed: none",
    ),
}


def configure(path, spec: dict[str, Any], **changes: Any) -> None:
    EngineArgs(model=str(path), skip_tokenizer_init=True, speculative_config=spec, **changes).create_engine_config()


@pytest.mark.parametrize("case", SETTINGS)
def test_setting(model_dir, case):
    changes, message = SETTINGS[case]
    with pytest.raises(SettingsError, match=message):
        configure(model_dir("llama"), layer_skip(LAYERS // 2, 3) | changes)


@pytest.mark.parametrize("method", ["layer_skip", "skip"])
def test_engine_argument(model_dir, method):
    """One of those that tests/contract/compatibility.py has all of."""
    message = "decode_context_parallel_size = 2 .*allowed: 1; use tensor_parallel_size"
    with pytest.raises(SettingsError, match=message):
        configure(
            model_dir("llama"),
            {"method": method, "layer_skip": 4},
            tensor_parallel_size=2,
            decode_context_parallel_size=2,
        )


def test_a_model_that_drafts_would_spoil(model_dir, monkeypatch):
    monkeypatch.setattr(ModelConfig, "is_hybrid", property(lambda self: True))
    with pytest.raises(SettingsError, match="recurrent state"):
        configure(model_dir("llama"), layer_skip(4, 3))


def test_through_vllm_llm_too(model_dir):
    """vLLM's own constructor hands the message on, whatever it wraps it in."""
    with pytest.raises(ValueError, match="layer_skip = 8 is out of range"), live(model_dir("llama"), layer_skip(8, 3)):
        pass


def test_live_gate_refuses_and_keeps_what_it_had(model_dir):
    with live(model_dir("llama"), layer_skip(4, 3, gate="maxp", tau=1.0)) as engine:
        for kind, threshold in (("maxp", 1.5), ("varh", 4.0), ("varH", -1.0), ("none", 0.5)):
            with pytest.raises(SettingsError):
                engine.set_gate(kind, threshold)
        engine.generate([[5, 6, 7]], greedy(16))
        made = engine.counts()
        assert made.drafted == made.rounds > 0  # still the gate that closes after each step


def test_vllms_own_settings_still_work(model_dir):
    """Keys that are vLLM's, dashes instead of underscores, and the defaults: copies of all layers, twelve tokens."""
    spec = {"method": "layer_skip", "draft-sample-method": "probabilistic"}
    path = str(model_dir("llama"))
    config = EngineArgs(model=path, skip_tokenizer_init=True, speculative_config=spec).create_engine_config()
    settings = settings_of(config)
    assert settings is not None
    assert (settings.layer, settings.k) == (LAYERS, 12)
    assert config.speculative_config.draft_sample_method == settings.draft_sample_method == "probabilistic"
    assert config.speculative_config.num_speculative_tokens == settings.width


def test_an_engine_without_our_method_has_none_of_our_settings(model_dir):
    config = EngineArgs(model=str(model_dir("llama")), skip_tokenizer_init=True).create_engine_config()
    assert settings_of(config) is None
    assert collects(config) == ()
    assert not config.parallel_config.worker_extension_cls
    assert "selfspec" not in str(config.additional_config)
