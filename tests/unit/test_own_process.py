"""How the processes of engines on a GPU start: forked where that is safe, else spawned as servers' are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
import torch
from selfspec_cli.config.schema import EngineConfig, RunConfig
from selfspec_cli.engine import live

live.fork_engines(RunConfig(engine=EngineConfig(name="one", device=sys.argv[1])))
torch.rand(2**20).sort()  # in parallel where there are threads for it
print(live._how_processes_start(), flush=True)
if live._how_processes_start() == "fork":
    engine = os.fork()
    if not engine:
        torch.rand(2**20).sort()  # hangs in a fork of a process that has run it in parallel
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize(("device", "how"), [("cuda", "fork"), ("cpu", "spawn")])
def test_engines_are_forked_from_a_process_that_keeps_pytorch_to_one_thread(device, how):
    threads = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, device], env=threads, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split()) == (0, [how]), done.stderr
