"""Keys of vLLM's compile cache: early exit finds what a plain engine compiled; what depends on drafts stays apart."""

import json
import pickle

import pytest

from selfspec_cli.vllm_plugin import compile_cache, register
from tests.contract.test_spec_config import CONFIG

pytestmark = pytest.mark.contract


@pytest.fixture
def config(tmp_path):
    """The configuration of an engine as a worker gets it, on a device that captures graphs."""
    from vllm.config import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def of(sizes=None, **spec):
        register()
        speculative = {"method": "layer_skip", "num_speculative_tokens": 3, **spec} if spec else None
        made = EngineArgs(
            model=str(tmp_path), skip_tokenizer_init=True, max_num_seqs=16, speculative_config=speculative
        ).create_engine_config()
        chosen = made.compilation_config
        chosen.cudagraph_mode, chosen.cudagraph_capture_sizes = CUDAGraphMode.FULL, sizes
        chosen.max_cudagraph_capture_size = None
        made._set_cudagraph_sizes()
        return pickle.loads(pickle.dumps(made))

    return of


def sizes_of(config):
    return config.compilation_config.cudagraph_capture_sizes


@pytest.mark.parametrize("sizes", [None, [1, 2, 4, 12, 40]], ids=["vllm_chooses", "given"])
@pytest.mark.parametrize(
    "spec",
    [
        {"layer_skip": 2},
        {"layer_skip": 4, "num_speculative_tokens": 7, "gate": "maxp"},
        {"draft_weights": "int8", "num_speculative_tokens": 5, "length_table": "1:5 4:2"},
    ],
    ids=["first_layers", "gate", "copies"],
)
def test_what_is_compiled_has_the_key_of_a_plain_engine(config, spec, sizes):
    plain, early = config(sizes), config(sizes, **spec)
    assert sizes_of(early) != sizes_of(plain) or sizes is not None  # graphs of a verify pass have other sizes
    shown = compile_cache.as_plain(early)
    assert shown.compute_hash() == plain.compute_hash()
    assert sizes_of(shown) == sizes_of(plain)
    # What is captured stays as it was chosen, and the parts of the model find each other by the same context.
    assert sizes_of(early) == sizes_of(config(sizes, **spec)) and early.speculative_config is not None
    context = shown.compilation_config.static_forward_context
    assert context is early.compilation_config.static_forward_context


def test_what_a_start_measures_of_memory_is_kept_for_what_drafts(config):
    """vLLM's plan of a start (VLLM_ENABLE_STARTUP_PLAN) has this key, and copies leave less for keys and values."""
    specs = [{"layer_skip": 2}, {"layer_skip": 4}, {"layer_skip": 2, "draft_weights": "int8"}]
    keys = [config(**spec).compute_hash() for spec in specs] + [config().compute_hash()]
    assert len(set(keys)) == len(keys)
    assert config(**specs[0]).compute_hash() == keys[0]


def test_the_engine_says_how_long_all_was_compiled(config):
    from torch import nn

    early = config(layer_skip=2)
    target, draft, other = (nn.Linear(1, 1) for _ in range(3))
    for part, seconds in ((target, 2.0), (draft, 0.5)):
        part.compilation_config = compile_cache.as_plain(early).compilation_config
        part.compilation_config.compilation_time += seconds
    other.compilation_config = early.compilation_config
    early.compilation_config.compilation_time = 0.25  # of what was compiled under the engine's own key
    compile_cache.count_times([nn.Sequential(target, other), nn.Sequential(draft, target)], early)
    assert early.compilation_config.compilation_time == 2.75
