"""An engine in a process of its own, as it is on a GPU by default, beside work that this process has done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]
PROGRAM = """
import torch
from selfspec_cli.config.schema import EngineConfig, ModelConfig, RunConfig
from selfspec_cli.engine.live import open_engine

if __name__ == "__main__":
    torch.rand(2**20).sort()  # in parallel, which a fork does not survive
    engine = EngineConfig(name="gpu", enforce_eager=True, kv_cache_gib=1.0)
    with open_engine(RunConfig(model=ModelConfig(dtype="bfloat16"), engine=engine, layer=3, k=4)) as engine:
        done = engine.generate([[5, 6, 7]], 16, batch=1)
        assert len(done.outputs[0]) == 16 and done.drafted
        print("generated")
"""


def test_an_engine_starts_although_pytorch_has_run_in_parallel_here(tmp_path):
    file = tmp_path / "program.py"  # spawning reads the main module again, so it has to be a file
    file.write_text(PROGRAM)
    environ = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": os.pathsep.join([str(REPO), *sys.path]),
    }
    environ.pop("VLLM_WORKER_MULTIPROC_METHOD", None)
    done = subprocess.run([sys.executable, str(file)], env=environ, capture_output=True, text=True, timeout=240)
    assert "generated" in done.stdout, done.stderr[-2000:]
