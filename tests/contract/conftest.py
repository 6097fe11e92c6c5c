"""The source of each supported release, an engine's configuration, and a scheduler as an engine on CUDA makes it."""

import json

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


CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
CONFIG |= {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG |= {"num_hidden_layers": 8, "vocab_size": 512, "max_position_embeddings": LEN}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model of eight layers without weights: nothing here loads any."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def configured(folder):
    """Make the configuration of an engine with this speculative_config, and other arguments of vLLM's."""
    from vllm.engine.arg_utils import EngineArgs

    from selfspec_cli.vllm_plugin import register

    register()

    def config(spec=None, **arguments):
        usual = {"model": str(folder), "skip_tokenizer_init": True, "dtype": "float32", "served_model_name": "tiny"}
        return EngineArgs(speculative_config=spec, **usual | arguments).create_engine_config()

    return config


@pytest.fixture
def make(configured, monkeypatch):
    """A scheduler as an engine on CUDA makes it, asynchronous or not. blocks: of its KV cache; v2: the V2 runner's."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    limits = {"max_num_seqs": MOST, "max_model_len": LEN, "max_num_batched_tokens": 64, "block_size": BLOCK}

    def scheduler(asynchronous=True, blocks=1000, log_stats=False, v2=True, **spec):
        spec = {"method": "layer_skip", "layer_skip": 1, "num_speculative_tokens": K, **spec}
        config = configured(spec, enable_prefix_caching=False, **limits)
        config.scheduler_config.async_scheduling = asynchronous
        config.cache_config.num_gpu_blocks = blocks
        group = KVCacheGroupSpec(
            ["layer"], FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        )
        with monkeypatch.context() as patch:
            patch.setattr(type(config), "use_v2_model_runner", property(lambda self: v2))
            return config.scheduler_config.get_scheduler_cls()(
                vllm_config=config,
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK,
                kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group]),
                log_stats=log_stats,
            )

    return scheduler
