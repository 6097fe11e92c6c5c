"""What every test process needs to know before vLLM is imported."""

import atexit
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# vLLM's engine in the test's own process: one process fewer, and errors keep their type.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reaches for the network is a mistake

# One thread: tiny models gain nothing from two, and two threads on cores that are shared wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # of vLLM's n-gram drafts, which sets OpenMP's number for the process
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Processes that tests start compile selfspec's own files once, and not each for itself: up to a second each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# See processes/sitecustomize.py, which the processes that tests start import from here.
PROCESSES = Path(__file__).with_name("processes")
sys.path.append(str(Path(__file__).parent / "packages" / "faults"))
os.environ["PYTHONPATH"] = os.pathsep.join([str(PROCESSES), *filter(None, [os.environ.get("PYTHONPATH")])])
if "SELFSPEC_TESTS_FOUND" not in os.environ:  # the first process, whose environment the others get
    os.environ["SELFSPEC_TESTS_FOUND"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["SELFSPEC_TESTS_FOUND"], ignore_errors=True)
runpy.run_path(str(PROCESSES / "sitecustomize.py"))

MARKED = ("contract", "engine", "gpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of these folders has the folder's mark."""
    for item in items:
        for folder in MARKED:
            if Path(__file__).with_name(folder) in item.path.parents:
                item.add_marker(folder)


@pytest.fixture(autouse=True)
def heads_are_derived_into_a_folder_of_the_tests(monkeypatch, tmp_path_factory):
    """Not into the cache of whoever runs them."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setattr("selfspec_cli.config.model_files.cache_dir", lambda: folder)


@pytest.fixture(autouse=True)
def the_same_random_numbers_every_time():
    """A test that draws without a generator of its own draws the same each time, alone or among others."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
