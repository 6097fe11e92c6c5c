"""Runs kernels_interpreted.py in a process of its own: Triton decides when it is imported whether to interpret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_kernels_in_tritons_interpreter():
    pytest.importorskip("triton")
    tests = Path(__file__).with_name("kernels_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(tests)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
