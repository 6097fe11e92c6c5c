"""The packaged shapes without weights are configs that vLLM reads as the models that they represent."""

import pytest
from vllm.config import ModelConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.facts import model_facts
from selfspec_cli.config.paths import model_path

pytestmark = pytest.mark.contract


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
