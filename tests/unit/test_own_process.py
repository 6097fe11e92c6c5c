"""How the processes of engines on a GPU start: forked where that is safe, else spawned as servers' are."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
import torch
from selfspec_cli.config.schema import EngineConfig, RunConfig
from selfspec_cli.engine.processes import fork_engines, how_they_start

torch.rand(2**20).sort()  # in parallel
fork_engines(RunConfig(engine=EngineConfig(device=sys.argv[1])))
print(how_they_start(), flush=True)
if how_they_start() == "fork":
    engine = os.fork()
    if not engine:
        torch.rand(2**20).sort()  # hangs in a fork of a process that has run it in parallel
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize(("device", "how"), [("cuda", "fork"), ("cpu", "spawn")])
def test_engines_are_forked_where_pytorch_is_kept_to_one_thread_and_do_not_hang(device, how):
    threads = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, device], env=threads, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split()) == (0, [how]), done.stderr
