"""Puts the patches of patches.py in place, if the installed vLLM is one that they are known to fit."""

import importlib
import logging
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from selfspec_cli.vllm_plugin import releases
from selfspec_cli.vllm_plugin.detection import answer_on_request
from selfspec_cli.vllm_plugin.patches import PATCHES, Stage

_ENGINE_ARGS = "vllm.engine.arg_utils:EngineArgs"
_ENTRANCES = ("create_engine_config", "create_speculative_config")
"""Methods of EngineArgs that every engine is built through, the most lasting name first."""

_applied: set[str] = set()
_entrances: list[tuple[Any, str, Any]] = []
"""What `_answer_requests` replaced: class, name, and vLLM's own method."""


def check() -> list[tuple[str, bool, str]]:
    """(target, found, reason) for every patch: what `selfspec doctor` shows. Imports vLLM, changes nothing."""
    return [(patch.target, _find(patch.target) is not None, patch.reason) for patch in PATCHES]


def register() -> None:
    """Put the patches of the stage "config" in place where their modules are imported already. Never raises.
    vLLM calls this in each process after it has imported what the process works with, so a module that is missing is
    one that is not used here, or that `hooks.early_exit_on_request` patches when early exit is asked for. Where early
    exit cannot be had, or nobody has tried it, only a request for early exit is answered."""
    try:
        reason = releases.refusal()
        if reason is None:
            return apply("config", imported_only=True)
        answer, said = _admit, ""  # an untried release is compared when early exit is asked for
        if releases.installed() is None:
            answer, said = (lambda: reason), reason
    except Exception as error:
        said = f"selfspec {releases.own_version()} could not prepare vLLM for it: {error}"
        answer = lambda: said  # noqa: E731 - like the one above
    try:
        _answer_requests(answer, said)
    except Exception as error:  # then vLLM itself refuses the method, by its own words
        _logger().warning("selfspec stays out of the way: %s (%s)", said, error)


def _admit() -> str | None:
    """Compare this release, and prepare vLLM for early exit if it has all that is used; else say what has moved."""
    from selfspec_cli.vllm_plugin.releases import admission

    reason = admission.admit()
    if reason is None:
        while _entrances:
            setattr(*_entrances.pop())
        apply("config")
        _logger().warning("%s", releases.untried())
    return reason


def _answer_requests(answer: Callable[[], str | None], said: str) -> None:
    """Make a request for early exit get `answer`; log `said` if early exit cannot be had whatever is asked for."""
    module, _, name = _ENGINE_ARGS.partition(":")
    owner = getattr(sys.modules.get(module), name, None)
    if owner is None:
        return  # a process that builds no engine from arguments
    if _ENGINE_ARGS in _applied:
        return
    entrance = next((each for each in _ENTRANCES if each in vars(owner)), None)
    if entrance is not None:
        original = getattr(owner, entrance)
        _entrances.append((owner, entrance, original))
        setattr(owner, entrance, answer_on_request(original, answer))
    _applied.add(_ENGINE_ARGS)
    if said:  # vLLM loads its plugins before it sets up its log, and Python drops what is less than a warning till then
        _logger().warning("no early exit here: %s", said)


def apply(stage: Stage, imported_only: bool = False) -> None:
    """Put the patches of `stage` in place, all of them or none. imported_only: leave out patches of modules that nobody
    has imported yet. Raises RuntimeError for another vLLM version or a target that is not there."""
    reason = releases.refusal()
    if reason is not None:
        raise RuntimeError(reason)
    found: list[tuple[str, Any, str, Any]] = []
    for patch in PATCHES:
        target = patch.target
        if patch.stage != stage or target in _applied:
            continue
        if imported_only and target.partition(":")[0] not in sys.modules:
            continue
        place = _find(target)
        if place is None:
            raise RuntimeError(f"vLLM has no {target}, which selfspec replaces because {patch.reason}")
        owner, name = place
        found.append((target, owner, name, pkgutil.resolve_name(patch.replacement)(getattr(owner, name))))
    for target, owner, name, replacement in found:
        setattr(owner, name, replacement)
        _applied.add(target)


def _find(target: str) -> tuple[Any, str] | None:
    """(owner, attribute name) of "module:a.b", None where any part is missing."""
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
    except (ImportError, AttributeError):
        return None
    return (owner, name) if name in vars(owner) else None


def _logger() -> logging.Logger:
    return logging.getLogger("vllm.selfspec")  # below vLLM's own logger, which users configure
