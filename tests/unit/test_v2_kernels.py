"""Runs kernels_interpreted.py in a process of its own, because Triton decides when it is imported whether to interpret;
and compiles the kernels for a GPU, which needs none."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
PACKAGES = HERE.parent / "packages"
HAS_VLLM = find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")  # and is not imported here


def run(*command: str, packages: tuple[str, ...] = (), **environment: str) -> str:
    """What Python prints, with some of the folders of tests/packages installed."""
    paths = [str(PACKAGES / name) for name in packages] + [str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths), **environment}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def interpreted(*files: str, words: tuple[str, ...] = ("-q",), packages: tuple[str, ...] = ()) -> str:
    """What pytest prints of some files of this folder, in one process, for importing PyTorch takes longer than most."""
    paths = [str(HERE / f"{name}_interpreted.py") for name in files]
    return run("-m", "pytest", "-p", "bounds", *words, *paths, packages=packages, TRITON_INTERPRET="1")


def for_cuda(*names: str, packages: tuple[str, ...] = ()) -> str:
    return run(str(HERE / "kernels_for_cuda.py"), *names, packages=packages)


def test_the_kernels_how_much_is_drafted_and_every_setting_of_a_kernel_in_tritons_interpreter():
    assert " passed" in interpreted("kernels", "round_setup", "matches")


@needs_vllm
def test_what_imports_vllm_in_tritons_interpreter():
    """The speculator, the draft's attention, and products with integer copies in a compiled layer."""
    assert " passed" in interpreted("speculator", "attention", "lowbit")


def test_every_kernel_compiles_for_cuda_as_it_is_meant_to():
    """In one process: importing Triton and PyTorch takes longer than to compile."""
    names = ["rounding", "several", "few", "shorten", "choose", "begin", "matching"]
    for_cuda(*names, *(["attention"] if HAS_VLLM else []), "ahead")


def test_the_kernels_with_twelve_gates():
    """Every statistic of three packages, in one more power of two than eight."""
    others = ["ratio", "doubt", "peak", "energy", "surprise", "spread", "survival"]
    selected = f"statistics_equal or gates_open and ({' or '.join(others)})"
    printed = interpreted("kernels", words=("-v", "-k", selected), packages=("toy", "more_gates"))
    for gate in others:
        assert f"test_gates_open_where_the_plain_rule_does[{gate}] PASSED" in printed


def test_more_gates_add_no_reduction_to_their_kernel():
    """For compute capability 9.0, as far as PTX and machine code: Triton brings ptxas."""
    few, many = (for_cuda("gates", packages=packages).split() for packages in ((), ("toy", "more_gates")))
    assert (few[0], many[0]) == ("6", "12")
    assert few[1] == many[1]
