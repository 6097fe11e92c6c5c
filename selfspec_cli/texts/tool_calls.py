"""Rows of BFCL's question files (package bfcl-eval): a user's turns, and the functions that the model may call.

The files are JSON lines with `id`, `question` (turns, each a list of messages) and `function` (schemas). Rows of
multi_turn name classes instead, whose functions are in a folder `multi_turn_func_doc` in the folder of the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfspec_cli.config.schema import ConfigError

FUNCTION_FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
    "WebSearchAPI": "web_search",
}
"""Files of `multi_turn_func_doc`, by the class that a row names."""
JSON_TYPES = {
    "dict": "object",
    "hashmap": "object",
    "float": "number",
    "double": "number",
    "long": "integer",
    "tuple": "array",
    "arraylist": "array",
    "array": "array",
    "string": "string",
    "char": "string",
    "boolean": "boolean",
}
"""Types of JSON schema, by the lower-case name of a type of Python, Java or JavaScript in the files."""


def is_question(row: Mapping[str, Any]) -> bool:
    turns = row.get("question")
    return "id" in row and isinstance(turns, list) and bool(turns) and all(isinstance(turn, list) for turn in turns)


def said(row: Mapping[str, Any], role: str) -> list[str]:
    """Return what a role says in each turn; turns without a word of it are left out."""
    turns = [[str(message["content"]) for message in turn if message["role"] == role] for turn in row["question"]]
    return ["\n\n".join(turn) for turn in turns if any(turn)]


def tools(row: Mapping[str, Any], file: Path) -> list[dict[str, Any]]:
    """Return the functions of a row of `file` in the form of the chat completions API, with types of JSON schema;
    raises ConfigError where the functions of a class that the row names are not there."""
    functions = row.get("function")
    if functions is None:
        left_out = row.get("excluded_function", ())
        functions = [
            function
            for name in row.get("involved_classes", ())
            for function in _functions_of_class(str(name), str(row["id"]), file)
            if function["name"] not in left_out
        ]
    made = []
    for function in functions:
        parameters = _json_schema(function.get("parameters", {}))
        about = {"name": function["name"], "description": function.get("description", ""), "parameters": parameters}
        made.append({"type": "function", "function": about})
    return made


def in_words(tools: Sequence[Mapping[str, Any]], system: str = "") -> str:
    """Return a system message that names the functions, for a model whose template takes none."""
    schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    call = '{"name": "...", "arguments": {"...": "..."}}'
    words = (
        f"You can call these functions; each line describes one as a JSON schema:\n{schemas}\n"
        f"Answer with one line for each call that is needed, and nothing else: {call}"
    )
    return "\n\n".join(text for text in (system, words if tools else "") if text)


def _functions_of_class(name: str, row: str, file: Path) -> list[dict[str, Any]]:
    if name not in FUNCTION_FILES:
        known = ", ".join(FUNCTION_FILES)
        raise ConfigError(f"workload.prompts={file}: {row} calls functions of {name}; allowed: {known}")
    source = file.parent / "multi_turn_func_doc" / f"{FUNCTION_FILES[name]}.json"
    try:
        return [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"workload.prompts={file}: {row} calls functions of {name}, which cannot be read from {source}; keep the "
            "file in the package's folder, or copy multi_turn_func_doc as well"
        ) from error


def _json_schema(schema: Any) -> Any:
    """Return a schema with types of JSON schema; a type that allows everything is left out."""
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed = {key: _json_schema(value) for key, value in schema.items()}
    if isinstance(kind := changed.get("type"), str):
        changed["type"] = JSON_TYPES.get(kind.lower(), kind)
        if kind.lower() in ("any", ""):
            del changed["type"]
    return changed
