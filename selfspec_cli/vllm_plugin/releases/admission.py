"""Whether a release of vLLM that nobody has tried has what the plugin uses: names, parameters, fields.

Its source is read, not imported. A release that has all of it is treated like the supported one that it agrees with.
Names that are replaced are in patches.py, all else in seams.toml.
"""

import hashlib
import importlib.util
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from selfspec_cli.vllm_plugin import patches, releases, vllm_names
from selfspec_cli.vllm_plugin.releases import SUPPORTED, Release
from selfspec_cli.vllm_plugin.releases.source import Outline, Source
from selfspec_cli.whole import cache_dir, written

SHOWN = 3
"""Differences that a refusal names."""


def admit() -> str | None:
    """Admit the installed release if nothing has moved in it. Returns why early exit cannot be had; None if it can."""
    found = releases.installed()
    if found is None or releases.known(found[1]) is not None:
        return releases.refusal()
    missing = differences(found[1])
    if not missing:
        return None
    more = f"; and {len(missing) - SHOWN} more (selfspec doctor)" if len(missing) > SHOWN else ""
    return f"{releases.unknown(*found)}. Unlike the nearest supported release: {'; '.join(missing[:SHOWN])}{more}"


def differences(version: str) -> list[str]:
    """What moved in the installed vLLM since the nearest supported release, a line each. Admits it if nothing did."""
    agrees, missing = compared(version.partition("+")[0], SUPPORTED)
    if agrees is not None:
        releases.admit(version, agrees)
    return missing


Question = Callable[[Source], list[str]]
"""What is said of a release that does not have something, a line each; nothing of one that has it."""


def moved(source: Source, release: Release) -> list[str]:
    """What `source` does not have as `release` has it, a line each; empty where an engine can be tried."""
    return list(dict.fromkeys(line for question in _doubts(source, release) for line in question(source)))


def _doubts(source: Source, release: Release) -> list[Question]:
    """The questions that the outline of `source` does not answer: whole files have to be read for them."""
    return [question for question in _questions(release) if _doubtful(question, source.outline)]


def _doubtful(question: Question, outline: Outline) -> bool:
    try:
        return bool(question(outline))
    except SyntaxError:  # a file that is not formatted as vLLM's are
        return True


def _questions(release: Release) -> Iterator[Question]:
    """One for each name that is replaced or imported, each signature, and each class whose parts are used."""
    for target in [*(patch.target for patch in patches.PATCHES), *vllm_names.PLACES.values()]:
        yield partial(_is_there, target)
    for target, expected in signatures(release).items():
        yield partial(_signature, target, expected)
    for target, names in vllm_names.SEAMS["fields"].items():
        yield partial(_has, Source.fields, target, names.split())
    for target, names in vllm_names.SEAMS["attributes"].items():
        yield partial(_has, Source.attributes, target, names.split())


def signatures(release: Release) -> dict[str, list[str]]:
    """Target -> its parameters in `release`."""
    own = vllm_names.SEAMS.get(f"signatures of {release.release}", {})
    return {target: words.split() for target, words in {**vllm_names.SEAMS["signatures"], **own}.items()}


def _is_there(target: str, source: Source) -> list[str]:
    """A name that is replaced must be the class's own: what a base class has is replaced there."""
    return [] if source.find(target, own=True) is not None else [f"{target} is not there"]


def _signature(target: str, expected: list[str], source: Source) -> list[str]:
    found = source.parameters(target)
    if found is None:
        return [f"{target} is not there"]
    if found == expected:
        return []
    changes = [f"without {name}" for name in expected if name not in found]
    changes += [f"with {name}" for name in found if name not in expected]
    return [f"{target} takes other parameters: {', '.join(changes) or 'another order'}"]


def _has(read: Callable[[Source, str], Collection[str]], target: str, names: list[str], source: Source) -> list[str]:
    found = read(source, target)
    return [f"{target} has no {name}" for name in names if name not in found]


def compared(version: str, supported: tuple[Release, ...]) -> tuple[Release | None, list[str]]:
    """The supported release that the installed vLLM agrees with, and what is missing for the nearest one where there is
    none. Reads some hundred files the first time (0.1 s), and what was found from then on."""
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
    newest_first = supported[::-1]
    nearest_first = sorted(newest_first, key=lambda each: len(_doubts(source, each)))
    agrees = next((each for each in nearest_first if not moved(source, each)), None)
    missing = [] if agrees is not None else moved(source, nearest_first[0])
    with suppress(OSError), written(kept) as part:
        document = {"asked": asked(supported), "agrees": agrees and agrees.release, "moved": missing}
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return agrees, missing


def asked(supported: tuple[Release, ...]) -> str:
    """A digest of all that is compared: another selfspec asks anew."""
    every = [vllm_names.SEAMS, [patch.target for patch in patches.PATCHES], supported]
    return hashlib.sha256(repr(every).encode()).hexdigest()[:16]
