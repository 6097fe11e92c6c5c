"""The words of the first sprint's documents (LAYERSKIP, EE_GATE, --ee_weight, ...) as the settings of today.

Nothing reads the old words; whoever meets one answers with the line to type. Free of torch, vLLM and Typer.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.settings import DRAFT_LENGTH, SPECULATIVE_LENGTH
from selfspec_cli.early_exit.thresholds import check_threshold

VARIABLES = ("LAYERSKIP", "EE_GATE", "EE_TAU", "EE_TAU_V")
"""The sprint's environment variables."""

_KEYS = {
    "layerskip": "layer",
    "layer_skip": "layer",
    "ee_gate": "gate",
    "ee_tau": "tau",
    "ee_tau_v": "tau_v",
    "ee_weight": "head.path",
    "forward_partial": "forward_partial",
}
_SPEC_KEYS = {"layer": "layer_skip", "head.path": "head_path"}
_OPTION = re.compile(r"^--([A-Za-z_-]+)(?:=(.*))?$")
_WORD = re.compile(r"^([A-Za-z_]+)(?:=(.*))?$")


def in_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The old words that are set in an environment: settings of today by key, "0" for a layer being off."""
    return {_KEYS[name.lower()]: environment[name] for name in VARIABLES if environment.get(name)}


def in_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The old words among a command's arguments, by the key of today, and the arguments that are left.

    Taken are --layerskip 12, --layerskip=12 and LAYERSKIP=12 alike, dashes for underscores too, and forward_partial
    with a layer or without one. Of today's own words (layer=12, `layer_skip` as a value) none is taken.
    """
    old: dict[str, str] = {}
    rest: list[str] = []
    waiting: str | None = None  # an option whose value is the next argument
    for argument in arguments:
        option, word = _OPTION.match(argument), _WORD.match(argument)
        named = option or word
        name = "" if named is None else named[1].lower().replace("-", "_")
        is_old = name in _KEYS and (option is not None or "=" in argument or name == "forward_partial")
        if named is not None and is_old:
            old[_KEYS[name]] = named[2] or ""
            waiting = _KEYS[name] if option is not None and named[2] is None else None
        elif waiting is not None and not argument.startswith("-"):
            old[waiting], waiting = argument, None
        else:
            waiting = None
            rest.append(argument)
    return old, rest


def settings(old: Mapping[str, str]) -> dict[str, str]:
    """Settings of today by their keys, from old words by the key of today; method=baseline alone where they mean off.

    A gate may carry its threshold (varH,5). A threshold without a gate chooses its gate, and one that the gate does
    not use is left out. Raises SettingsError for an unknown gate, or a value that cannot be one.
    """
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
        check_threshold(kind, _as_json("tau", value), key or "threshold")
    return current | {"gate": kind} | ({key: value} if key and value else {})


def words(current: Mapping[str, str]) -> str:
    """Settings as the command line takes them, such as layer=12 gate=varH tau_v=5."""
    return shlex.join(f"{key}={value}" for key, value in current.items())


def speculative_config(current: Mapping[str, str]) -> str:
    """Settings as vLLM takes them: the speculative_config as JSON, "null" where early exit is off."""
    if current.get("method") == "baseline":
        return "null"
    spec: dict[str, Any] = {"method": "layer_skip"}
    spec |= {_SPEC_KEYS.get(key, key): _as_json(key, value) for key, value in current.items()}
    if spec["method"] == "layer_skip":
        spec[SPECULATIVE_LENGTH] = DRAFT_LENGTH
    return json.dumps(spec)


def _as_json(key: str, value: str) -> int | float | str:
    if key not in ("layer", "tau", "tau_v"):
        return value
    try:
        return int(value) if value.isdigit() else float(value)
    except ValueError:  # whoever checks it says so
        return value


def answer_for_arguments(command: str, arguments: Sequence[str]) -> str | None:
    """What to type in place of a command's arguments that hold old words; None where they hold none."""
    old, rest = in_arguments(arguments)
    if not old:
        return None
    split = rest.index("--") if "--" in rest else len(rest)  # what stands behind it is handed to vLLM
    parts = [shlex.join(rest[:split]), words(settings(old)), shlex.join(rest[split:])]
    line = " ".join(filter(None, ["selfspec", command, *parts]))
    return f"words of the first sprint are settings now; type:\n{line}"


def answer_for_environment(environment: Mapping[str, str], command: str | None = None) -> str | None:
    """One line about old variables that are set and are not read; None where there are none. Never raises.

    command: the `selfspec` command that is running, None inside vLLM.
    """
    old = in_environment(environment)
    if not old:
        return None
    given = " ".join(f"{name}={environment[name]}" for name in VARIABLES if environment.get(name))
    try:
        current = settings(old)
    except SettingsError as error:
        return f"the environment has {given}, which nothing reads; {error}"
    if command is not None:
        return f"the environment has {given}, which nothing reads; type: selfspec {command} {words(current)}"
    if current == {"method": "baseline"}:
        return f"the environment has {given}, which nothing reads; without a --speculative-config early exit is off"
    return (
        f"the environment has {given}, which nothing reads; type: --speculative-config "
        f"{shlex.quote(speculative_config(current))}"
    )
