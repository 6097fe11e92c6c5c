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


def compiled(build: Any, changes: tuple[tuple[str, str], ...] = ()) -> Path:
    """A shared library with a build's kernel. changes: (old, new) text of the source, for a fault that is planted."""
    parts = files("selfspec_cli.vllm_plugin.fused_step")
    source = "".join((parts / part).read_text() for part in build.parts)
    for old, new in changes:
        assert source.count(old) == 1, f"the source has {source.count(old)} times: {old}"
        source = source.replace(old, new)
    text = f'#include "{HERE / "cuda.h"}"\n{source}{ENTRY % build.name.decode()}'
    options = [
        "-std=c++17",
        "-O1",
        "-fno-strict-aliasing",
        "-ffp-contract=off",
        "-w",
        "-shared",
        "-fPIC",
        *build.options,
    ]
    key = hashlib.sha256("\0".join([text, (HERE / "cuda.h").read_text(), *options]).encode()).hexdigest()[:24]
    library = FOLDER / f"{key}.so"
    if not library.exists():
        FOLDER.mkdir(exist_ok=True)
        written = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", *options, "-x", "c++", "-", "-o", str(written)], input=text, text=True, check=True)
        written.rename(library)
    return library


def launch(library: Path, build: Any, arguments: ctypes.Structure, seed: int) -> None:
    """Run a launch to its end. seed: of the order of threads. A deadlock ends the process."""
    function = ctypes.CDLL(str(library)).launch
    function(ctypes.byref(arguments), build.grid, build.threads, build.shared_bytes, ctypes.c_uint(seed))
