"""`selfspec profile` on a GPU: a captured draft loop is counted as drafting, in this process and in another."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
WORDS = ["layer=3", "k=4", "model.dtype=bfloat16", "engine.device=cuda", "engine.kv_cache_gib=1", "--tokens", "48"]


@pytest.mark.parametrize("processes", ["0", "1"])
def test_the_parts_of_a_run_add_up(tmp_path, processes):
    environ = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": processes,
        "PYTHONPATH": os.pathsep.join([str(REPO), *sys.path]),
    }
    command = [sys.executable, "-m", "selfspec_cli", "profile", *WORDS, f"results_dir={tmp_path}", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    seconds = found["seconds"]
    assert found["gpu"] and sum(seconds.values()) == pytest.approx(found["wall"])
    assert {"draft", "verify", "sampler", "scheduler", "host"} <= set(seconds)
    assert seconds.get("other", 0) < 0.05 * found["wall"] and found["kernels"][0]["seconds"] > 0
    assert Path(found["files"]["trace"]).stat().st_size > 10_000
