"""Runs kernels_interpreted.py in a process of its own, because Triton decides when it is imported whether to interpret;
and compiles the kernels for a GPU, which needs none."""

from __future__ import annotations

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
MARK = "printed by "
HAS_VLLM = find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")  # and is not imported here


def run(*command: str, packages: tuple[str, ...] = (), **environment: str) -> str:
    """What Python prints, with some of the folders of tests/packages installed."""
    paths = [str(PACKAGES / name) for name in packages] + [str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths), **environment}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def interpreted(*files: str) -> str:
    """What pytest prints of some files of this folder, in one process, for importing PyTorch takes longer than most."""
    return pytest_interpreted("-q", *(str(HERE / f"{name}_interpreted.py") for name in files))


def pytest_interpreted(*words: str, packages: tuple[str, ...] = ()) -> str:
    return run("-m", "pytest", "-p", "quick_interpreter", *words, packages=packages, TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    """What the functions of kernels_for_cuda.py print, by name. All of them run in one process: importing Triton and
    PyTorch takes longer than to compile."""
    names = ["rounding", "several", "few", "shorten", "choose", "begin", "matching", "gates"]
    printed = run(str(HERE / "kernels_for_cuda.py"), *names, *(["attention"] if HAS_VLLM else []), "ahead")
    return {name: text for name, _, text in (part.partition("\n") for part in printed.split(MARK)[1:])}


def test_the_kernels_how_much_is_drafted_and_every_setting_of_a_kernel_in_tritons_interpreter():
    assert " passed" in interpreted("kernels", "round_setup", "matches")


@needs_vllm
def test_what_imports_vllm_in_tritons_interpreter():
    """The speculator, the draft's attention, and products with integer copies in a compiled layer."""
    assert " passed" in interpreted("speculator", "attention", "lowbit", "rounding")


def test_norms_and_activations_that_round_compile_for_cuda(compiled):
    """Nothing spills, and of a norm only its weight is read before the kernel in front has ended."""
    for line in compiled["rounding"].splitlines():
        name, spilt, before, after = line.split()
        assert int(spilt) == 0
        assert (int(before), int(after)) == ((8, 16) if name == "_add_and_norm" else (0, 16)), name


def test_several_rows_of_integer_copies_compile_for_cuda(compiled):
    """Weights are read 16 bytes at a time and in no other way, and nothing passes through shared memory or spills."""
    for line in compiled["several"].splitlines():
        bits, wide, narrow, shared, spilt = (int(word) for word in line.split())
        assert wide == 2 * bits and not narrow + shared + spilt, line  # two rows of 512 * bits bytes, by 32 lanes


def test_few_tokens_times_integer_copies_compile_for_cuda(compiled):
    """Weights go from memory to tensor cores 16 or 8 bytes at a time, nothing passes through shared memory but the sums
    of warps, and nothing spills."""
    for line in compiled["few"].splitlines():
        bits, products, loads, spilt, shared, sums = (int(word) for word in line.split())
        assert products == 6 and spilt == 0
        assert loads >= 6  # of weights: three groups of 16 rows
        assert shared == sums, bits


@needs_vllm
def test_the_drafts_attention_compiles_for_cuda(compiled):
    """It multiplies on tensor cores, spills nothing, and counts programs only where several share a request."""
    shared, alone = ([int(word) for word in line.split()] for line in compiled["attention"].splitlines())
    assert min(shared[0], alone[0]) >= 16
    assert (shared[1] > 0, alone[1]) == (True, 0)
    assert shared[2] == alone[2] == 0
    assert max(shared[3], alone[3]) < 227 * 2**10


def test_the_kernels_with_twelve_gates():
    """Every statistic of three packages, in one more power of two than eight."""
    tests = str(HERE / "kernels_interpreted.py")
    others = "ratio or doubt or peak or energy or surprise or spread or survival"
    selected = f"statistics_equal or gates_open and ({others})"
    printed = pytest_interpreted("-v", tests, "-k", selected, packages=("toy", "more_gates"))
    for gate in ("ratio", "doubt", "peak", "energy", "surprise", "spread", "survival"):
        assert f"test_gates_open_where_the_plain_rule_does[{gate}] PASSED" in printed


def test_what_is_compiled_ahead_is_not_compiled_when_it_is_launched(compiled):
    """And each kernel once: 4 and 8 tokens have the same product here. It ends with the block that it is beside where
    that raises, and a full disk is a warning; either way a launch compiles what it does not find."""
    whole, ended, full_disk = compiled["ahead"].splitlines()
    assert whole == "4 [] 14 []"
    assert ended.startswith("the layers do not fit ")
    before, product, launches, warnings = ended.removeprefix("the layers do not fit ").split()
    assert int(before) < 4 and (product, launches, warnings) == ("['_some_rows']", "2", "[]")
    assert full_disk == (
        "0 ['_some_rows'] 2 ['draft kernels: 5 could not be compiled ahead, and will be where they are first launched "
        "(OSError: [Errno 28] No space left on device)']"
    )


def test_the_kernels_that_shorten_a_block_table_read_all_before_they_write(compiled):
    """A row moves within itself, and a thread may overwrite what another one has to read."""
    places = [int(word) for word in compiled["shorten"].split()]
    assert places == sorted(places)
    choose, weigh = ([int(word) for word in line.split()] for line in compiled["choose"].splitlines())
    assert choose[0] == 0 and choose[1:] == sorted(choose)[1:]
    assert weigh[0] > 0  # its products are on tensor cores


def test_the_kernel_that_begins_a_round_compiles_for_cuda(compiled):
    """With what is learnt of confidence, and without."""
    words = compiled["begin"].split()
    assert words[::2] == ["fixed", "measured"]
    assert int(words[3]) > int(words[1])


def test_the_kernels_of_free_drafts_compile_for_cuda(compiled):
    look_up, judge, certain, turn, confidence = (line.split() for line in compiled["matching"].splitlines())
    assert look_up == ["0", "1"] and certain == turn == ["0", "0"]
    assert judge == ["0", "3"]  # two counters, and the rows that go on
    assert confidence == ["0", "4"]  # tokens that stood and that were judged, by confidence and by position


def test_the_kernel_with_the_gates_compiles_for_cuda_and_more_gates_add_no_reduction(compiled):
    """For compute capability 9.0, as far as PTX and machine code: Triton brings ptxas."""
    few = compiled["gates"].split()
    many = run(str(HERE / "kernels_for_cuda.py"), "gates", packages=("toy", "more_gates")).split("\n", 1)[1].split()
    assert (few[0], many[0]) == ("6", "12")
    assert few[1] == many[1]
