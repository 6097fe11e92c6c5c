"""Kernels of fused_step/ run on a CPU: their sources with `cuda.h` in place of CUDA, compiled by g++."""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOLDER = Path(tempfile.gettempdir()) / f"selfspec_emulated_{os.getuid()}"
ENTRY = """
extern "C" void launch(const Arguments* a, int blocks, int threads, unsigned shared, unsigned seed) {
    emulated::launch([a] { %s(*a); }, blocks, threads, shared, seed);
}
"""


RACES = ["-g", "-DRACES", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"]


def compiled(build: Any, changes: tuple[tuple[str, str], ...] = (), races: bool = False) -> Path:
    """A shared library with a build's kernel. changes: (old, new) text of the source, for a fault that is planted.
    races: a race in shared memory ends the process with 71 (races.cc)."""
    parts = files("selfspec_cli.vllm_plugin.fused_step")
    source = "".join((parts / part).read_text() for part in build.parts)
    for old, new in changes:
        assert source.count(old) == 1, f"the source has {source.count(old)} times: {old}"
        source = source.replace(old, new)
    text = f'#include "{HERE / "cuda.h"}"\n{source}{ENTRY % build.name.decode()}'
    options = ["-O1", "-fno-strict-aliasing", "-ffp-contract=off", *build.options, *(RACES if races else [])]
    key = _key(text, (HERE / "cuda.h").read_text(), *options)
    objects = [_made(f"{key}.o", *options, "-c", "-x", "c++", "-", text=text)]
    if races:
        file = HERE / "races.cc"
        objects.append(_made(f"{_key(file.read_text())}.o", "-O2", "-c", str(file)))
    return _made(f"{_key(*map(str, objects))}.so", "-shared", *map(str, objects))


def _key(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


def _made(name: str, *options: str, text: str | None = None) -> Path:
    """What g++ makes, unless it is there already. Processes may make it at once: it appears whole."""
    made = FOLDER / name
    if not made.exists():
        FOLDER.mkdir(exist_ok=True)
        written = made.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++17", "-w", "-fPIC", *options, "-o", str(written)]
        subprocess.run(command, input=text, text=True, check=True)
        written.rename(made)
    return made


def launch(library: Path, build: Any, arguments: ctypes.Structure, seed: int) -> None:
    """Run a launch to its end. seed: of the order of threads. A deadlock ends the process."""
    function = ctypes.CDLL(str(library)).launch
    function(ctypes.byref(arguments), build.grid, build.threads, build.shared_bytes, ctypes.c_uint(seed))
