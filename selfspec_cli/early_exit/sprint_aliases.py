"""The words of the first sprint's documents (LAYERSKIP, EE_GATE, --ee_weight, ...) as the settings of today.

Nothing reads the old words; whoever meets one answers with the line to type. Free of torch, vLLM and Typer."""

import re
import shlex
from collections.abc import Mapping, Sequence

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES, check_threshold

VARIABLES = ("LAYERSKIP", "EE_GATE", "EE_TAU", "EE_TAU_V")

_KEYS = {
    "layerskip": "layer",
    "layer_skip": "layer",
    "ee_gate": "gate",
    "ee_tau": "tau",
    "ee_tau_v": "tau_v",
    "ee_weight": "head.path",
    "forward_partial": "forward_partial",
}
_WORD = re.compile(r"(--)?([A-Za-z_-]+)(?:=(.*))?")


def in_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The old words among a command's arguments, by today's key, and the arguments that are left. --layerskip 12,
    --layerskip=12 and LAYERSKIP=12 are alike, dashes are underscores, and forward_partial has a layer or none. Today's
    own words (layer=12, `layer_skip` as a value) are left."""
    old: dict[str, str] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        match = _WORD.fullmatch(word)
        name = match[2].lower().replace("-", "_") if match else ""
        if match is None or name not in _KEYS or not (match[1] or "=" in word or name == "forward_partial"):
            rest.append(word)
        else:
            old[_KEYS[name]] = match[3] or (next(words, "") if match[1] and "=" not in word else "")
    return old, rest


def settings(old: Mapping[str, str]) -> dict[str, str]:
    """Today's settings from the old words of `in_arguments`; method=baseline alone where they mean off. A threshold
    alone chooses its gate; one that the gate does not use is left out. Raises SettingsError for unknown values."""
    partial = old.get("forward_partial")
    layer = old.get("layer", partial)
    if layer is not None and layer.strip() == "0":
        return {"method": "baseline"}
    if layer and not layer.strip().isdigit():
        raise SettingsError(f"layer {layer!r} must be a whole number: the exit layer, or 0 for off")
    current = {} if partial is None else {"method": "skip"}
    current |= {} if layer is None else {"layer": layer.strip() or "E"}
    current |= {"head.path": old["head.path"] or "FILE"} if "head.path" in old else {}
    kind, _, threshold = old.get("gate", "").partition(",")
    kind = kind or ("varH" if old.get("tau_v") and not old.get("tau") else "maxp" if old.get("tau") else "")
    if not kind:
        return current
    key = GATES[kind].key
    value = threshold or (old.get(key, "") if key else "")
    if value:
        is_number = re.fullmatch(r"-?\d*\.?\d+(e-?\d+)?", value)
        check_threshold(kind, float(value) if is_number else value, key or "threshold")
    return current | {"gate": kind} | ({key: value} if key and value else {})


def _line(command: str, *parts: str) -> str:
    return " ".join(filter(None, ["selfspec", command, *parts]))


def _words(current: Mapping[str, str]) -> str:
    return shlex.join(f"{key}={value}" for key, value in current.items())


def answer_for_arguments(command: str, arguments: Sequence[str]) -> str | None:
    """What to type in place of arguments with old words; None where there are none."""
    old, rest = in_arguments(arguments)
    if not old:
        return None
    split = rest.index("--") if "--" in rest else len(rest)  # what follows is for vLLM
    line = _line(command, shlex.join(rest[:split]), _words(settings(old)), shlex.join(rest[split:]))
    return f"words of the first sprint are settings now; type:\n{line}"


def answer_for_environment(environment: Mapping[str, str], command: str = "serve") -> str | None:
    """One line about old variables that are set, with the `selfspec` command to type; None where there are none."""
    old = {name: environment[name] for name in VARIABLES if environment.get(name)}
    if not old:
        return None
    given = f"the environment has {' '.join(f'{name}={value}' for name, value in old.items())}, which nothing reads"
    try:
        current = settings({_KEYS[name.lower()]: value for name, value in old.items()})
    except SettingsError as error:
        return f"{given}; {error}"
    return f"{given}; type: {_line(command, _words(current))}"
