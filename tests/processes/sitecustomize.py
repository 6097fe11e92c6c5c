"""What every Python process that a test starts runs first (`tests/conftest.py` puts this folder on its path, and runs
this file in the tests' own processes).

Importing vLLM makes some millions of objects that stay. With Python's usual threshold the garbage collector walks over
them time and again: a fifth of the import's processor time.

SELFSPEC_TESTS_FOUND=FOLDER keeps what Transformers finds out in every process that imports it, in a second and a half
of processor time: which distribution has which package, and which of its own files has which class. And Transformers
does not find scikit-learn, nor vLLM SciPy's signals, which they import for assisted generation and for sound: a second.

SELFSPEC_TESTS_FORK=1 spares a server the second import: the process of its engine is forked, where vLLM spawns it. A
forked one does not register the plugin for itself. So it is for tests of something else; tests/engine/test_server.py
has the spawned one.
"""

import functools
import gc
import hashlib
import importlib.metadata
import multiprocessing
import os
import pickle
import socket
import sys
from importlib.machinery import PathFinder
from pathlib import Path

gc.set_threshold(50_000)


def found_once(find, folder):
    """`find`, whose results are read from `folder` where a process with the same path has called it."""

    @functools.wraps(find)
    def read(*args, **more):
        asked = repr((find.__name__, args, more, sys.path)).encode()
        kept = folder / hashlib.sha256(asked).hexdigest()
        if not kept.exists():
            own = kept.with_suffix(f".{os.getpid()}")
            own.write_bytes(pickle.dumps(find(*args, **more)))
            own.replace(kept)
        return pickle.loads(kept.read_bytes())

    return read


class LessToImport:
    """Leaves SciPy's signals out, and replaces functions of the module of Transformers that looks for packages and for
    its own files."""

    def __init__(self, folder):
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        if name == "scipy.signal":
            raise ModuleNotFoundError("tests need no SciPy for sound", name=name)
        if name != "transformers.utils.import_utils":
            return None
        spec = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.define_import_structure = found_once(module.define_import_structure, self.folder)
            module.is_sklearn_available = lambda: False

        spec.loader.exec_module = exec_module
        return spec


if folder := os.environ.get("SELFSPEC_TESTS_FOUND"):
    importlib.metadata.packages_distributions = found_once(importlib.metadata.packages_distributions, Path(folder))
    sys.meta_path.insert(0, LessToImport(Path(folder)))


def leave_ports():
    """In a forked process: the server's port, which it has before it listens, is free when a test kills the server."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            found = socket.socket(fileno=number)
        except OSError:
            continue  # no socket
        if found.family in (socket.AF_INET, socket.AF_INET6):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        found.detach()


if os.environ.get("SELFSPEC_TESTS_FORK") == "1":
    os.register_at_fork(after_in_child=leave_ports)
    forking = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: forking
