"""`selfspec profile` on a GPU: the parts of a captured draft loop are told apart, in this process and in another."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
WORDS = ["layer=3", "k=4", "model.dtype=bfloat16", "engine.device=cuda", "engine.kv_cache_gib=1", "--tokens", "48"]


@pytest.mark.parametrize("processes", ["0", "1"])
def test_the_parts_of_a_captured_draft_loop_add_up(tmp_path, processes):
    environ = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": processes,
        "PYTHONPATH": os.pathsep.join([str(REPO), *sys.path]),
    }
    command = [sys.executable, "-m", "selfspec_cli", "profile", *WORDS, f"results_dir={tmp_path}", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["gpu"] and found["accounted"] == pytest.approx(1, abs=0.05)
    seconds = found["seconds"]
    assert {"trunk", "head", "gate", "verify", "sampler", "scheduler", "detokenise", "host"} <= set(seconds)
    # What the profiler knows no launch of is known from the order of a draft step's kernels.
    assert seconds.get("other", 0) < 0.05 * sum(seconds.values())
    assert seconds["trunk"] > seconds["head"] > 0
    read = [one for one in found["kernels"] if one["bytes"]]
    assert {one["part"] for one in read} >= {"trunk", "verify"}, found["unknown"]
    assert all(one["rate"] > 0 for one in read) and found["memory_rate"] > 1e11
    assert Path(found["files"]["trace"]).stat().st_size > 10_000
