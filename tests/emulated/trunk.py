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
    common = ["g++", "-std=c++17", "-fPIC", "-w", "-c"]
    options = ["-O1", "-fno-strict-aliasing", "-ffp-contract=off", *build.options, *(RACES if races else [])]
    headers = [(HERE / name).read_text() for name in ("cuda.h", "races.cc")]
    key = hashlib.sha256("\0".join([text, *headers, *options]).encode()).hexdigest()[:24]
    library = FOLDER / f"{key}.so"
    if not library.exists():
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            objects = [f"{folder}/kernel.o", *([f"{folder}/races.o"] if races else [])]
            kernel = [*common, *options, "-x", "c++", "-", "-o", objects[0]]
            subprocess.run(kernel, input=text, text=True, check=True)
            if races:
                subprocess.run([*common, "-O2", str(HERE / "races.cc"), "-o", objects[1]], check=True)
            subprocess.run(["g++", "-shared", *objects, "-o", f"{folder}/kernel.so"], check=True)
            Path(folder, "kernel.so").rename(library)
    return library


def launch(library: Path, build: Any, arguments: ctypes.Structure, seed: int) -> None:
    """Run a launch to its end. seed: of the order of threads. A deadlock ends the process."""
    function = ctypes.CDLL(str(library)).launch
    function(ctypes.byref(arguments), build.grid, build.threads, build.shared_bytes, ctypes.c_uint(seed))
