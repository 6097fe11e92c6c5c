"""What the choice of a draft asks of the target: vLLM's own configurations, without an engine."""

from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import EngineArgs

from selfspec_cli.vllm_plugin import target_facts, vllm_names
from selfspec_cli.vllm_plugin.target_facts import bits_of, linear_parameters

pytestmark = pytest.mark.contract

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
        ("compressed-tensors", {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}, 4),
    ],
)
def test_bits_of_the_weights(method, config, bits):
    assert bits_of(method, config) == bits


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_have_their_own_bits_where_activations_or_caches_have_others(bits):
    weights, other = {"num_bits": bits}, {"num_bits": 16 if bits == 4 else 4}
    group = {"input_activations": other, "weights": weights, "output_activations": other}
    assert bits_of("compressed-tensors", {"config_groups": {"group_0": group}, "kv_cache_scheme": other}) == bits


def test_the_parameters_of_a_mixture_are_those_of_all_its_experts():
    config = SimpleNamespace(**SIZES, num_local_experts=4)
    dense = linear_parameters(SimpleNamespace(**SIZES))
    experts = 3 * 32 * 48 * 3
    assert linear_parameters(config) == dense + 3 * experts
    config.moe_intermediate_size = 24
    assert linear_parameters(config) == dense + experts
