"""Whether a release of vLLM that nobody has tried has what the plugin uses: names, parameters, fields.

Its source is read, not imported. A release that has all of it is treated like the supported one that it agrees with.
"""

import hashlib
import importlib.util
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from selfspec_cli.vllm_plugin import patches, versions, vllm_names
from selfspec_cli.vllm_plugin.releases import SUPPORTED, Release, seams
from selfspec_cli.vllm_plugin.releases.source import Source
from selfspec_cli.whole import cache_dir, written

SHOWN = 3
"""Differences that a refusal names."""


def admit() -> str | None:
    """Admit the installed release if nothing has moved in it. Returns why early exit cannot be had; None if it can."""
    found = versions.installed()
    if found is None or versions.known(found[1]) is not None:
        return versions.refusal()
    missing = differences(found[1])
    if not missing:
        return None
    more = f"; and {len(missing) - SHOWN} more (selfspec doctor)" if len(missing) > SHOWN else ""
    return f"{versions.unknown(*found)}. Unlike the nearest supported release: {'; '.join(missing[:SHOWN])}{more}"


def differences(version: str) -> list[str]:
    """What moved in the installed vLLM since the nearest supported release, a line each. Admits it if nothing did."""
    agrees, missing = compared(version.partition("+")[0], SUPPORTED)
    if agrees is not None:
        versions.admit(version, agrees)
    return missing


def moved(source: Source, release: Release) -> list[str]:
    """What `source` does not have as `release` has it, a line each; empty where an engine can be tried."""
    return list(dict.fromkeys([*_names(source), *_signatures(source, release), *_parts(source)]))


def _names(source: Source) -> Iterator[str]:
    for patch in patches.PATCHES:
        if source.find(patch.target, own=True) is None:
            yield f"{patch.target} is not there"
    for target in vllm_names.PLACES.values():
        if source.defined(*target.split(":")) is None:
            yield f"{target} is not there"


def _signatures(source: Source, release: Release) -> Iterator[str]:
    for target, expected in seams.signatures(release).items():
        found = source.parameters(target)
        if found is None:
            yield f"{target} is not there"
        elif found != expected:
            changes = [f"without {name}" for name in expected if name not in found]
            changes += [f"with {name}" for name in found if name not in expected]
            yield f"{target} takes other parameters: {', '.join(changes) or 'another order'}"


def _parts(source: Source) -> Iterator[str]:
    parts = [(target, names, set(source.fields(target))) for target, names in seams.FIELDS.items()]
    parts += [(target, names, source.attributes(target)) for target, names in seams.ATTRIBUTES.items()]
    for target, names, found in parts:
        yield from (f"{target} has no {name}" for name in names.split() if name not in found)


def compared(version: str, supported: tuple[Release, ...]) -> tuple[Release | None, list[str]]:
    """The supported release that the installed vLLM agrees with, and what is missing for the nearest one where there is
    none. Reads some hundred files the first time, and what was found from then on."""
    kept = cache_dir() / "vllm" / f"{version}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(kept.read_text(encoding="utf-8"))
        if known["asked"] == asked(supported):
            agrees = next((each for each in supported if each.release == known["agrees"]), None)
            return agrees, list(known["moved"])
    found = importlib.util.find_spec("vllm")
    if found is None or not found.origin:
        return None, ["the package vllm is not there"]
    source = Source(Path(found.origin).parents[1])
    differences = [(each, moved(source, each)) for each in reversed(supported)]  # the newest first
    agrees = next((each for each, lines in differences if not lines), None)
    missing = min((lines for _, lines in differences), key=len)
    with suppress(OSError), written(kept) as part:
        document = {"asked": asked(supported), "agrees": agrees and agrees.release, "moved": missing}
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return agrees, missing


def asked(supported: tuple[Release, ...]) -> str:
    """A digest of all that is compared: another selfspec asks anew."""
    targets = [patch.target for patch in patches.PATCHES]
    facts = [seams.SIGNATURES, seams.FIELDS, seams.ATTRIBUTES, targets, vllm_names.PLACES]
    return hashlib.sha256(repr((facts, supported)).encode()).hexdigest()[:16]
