"""The source of each supported release, and a scheduler as an engine on CUDA makes it."""

import pytest
from v2_engine import BLOCK, LEN, MOST, K
from vllm_source import VARIABLE, Source, folder_of, sources

from selfspec_cli.vllm_plugin.releases import SUPPORTED


@pytest.fixture(scope="module", params=SUPPORTED, ids=lambda release: release.release)
def release(request):
    """A supported release that is installed or unpacked here."""
    version = request.param.release
    if folder_of(version) is None:
        pytest.skip(
            f"vLLM {version} is neither installed nor under {sources()} (${VARIABLE}): "
            f"python tests/contract/vllm_source.py {version}"
        )
    return request.param


@pytest.fixture(scope="module")
def vllm(release):
    """Its source."""
    return Source(folder_of(release.release))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("model")
    layers = {"num_hidden_layers": 4, "num_attention_heads": 1, "num_key_value_heads": 1}
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": LEN}
    LlamaConfig(architectures=["LlamaForCausalLM"], **layers, **sizes).save_pretrained(folder)
    return folder


@pytest.fixture
def make(folder, monkeypatch):
    """A scheduler as an engine on CUDA makes it, asynchronous or not. blocks: of its KV cache."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from selfspec_cli.vllm_plugin import register

    register()

    def scheduler(asynchronous=True, blocks=1000, log_stats=False, **spec):
        spec = {"method": "layer_skip", "layer_skip": 1, "num_speculative_tokens": K, **spec}
        limits = {"max_num_seqs": MOST, "max_model_len": LEN, "max_num_batched_tokens": 64, "block_size": BLOCK}
        plain = {"skip_tokenizer_init": True, "dtype": "float32", "enable_prefix_caching": False}
        config = EngineArgs(str(folder), speculative_config=spec, **limits, **plain).create_engine_config()
        config.scheduler_config.async_scheduling = asynchronous
        config.cache_config.num_gpu_blocks = blocks
        group = KVCacheGroupSpec(
            ["layer"], FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        )
        with monkeypatch.context() as patch:
            patch.setattr(type(config), "use_v2_model_runner", property(lambda self: True))
            return config.scheduler_config.get_scheduler_cls()(
                vllm_config=config,
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK,
                kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group]),
                log_stats=log_stats,
            )

    return scheduler
