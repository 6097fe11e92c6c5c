"""Prompts from the rows of a file: ShareGPT, Spec-Bench, SPEED-Bench, MT-Bench, GSM8K, HumanEval, BFCL, or own JSONL.

A row's prompt is its user's first turn; of `turns` the later ones are kept. Chats (`turns`, `conversations`,
`messages`) and tasks of GSM8K, HumanEval and BFCL go through the model's chat template, if any; text is unchanged.

BFCL's question files (package bfcl-eval) are JSON lines with `id`, `question` (turns, each a list of messages) and
`function` (schemas of functions to call). Rows of multi_turn name classes instead, of ./multi_turn_func_doc.
"""

import gzip
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from selfspec_cli.config.paths import prompts_file
from selfspec_cli.config.schema import HUMANEVAL, PROMPT_TABLES, ConfigError
from selfspec_cli.extras import install

CHATS = ("turns", "conversations", "messages")
COLUMNS = (*CHATS, "prompt", "question", "text")  # the first of these that a row has, unless the user names one
USERS = ("user", "human")
TASKS = {"gsm8k": {"question", "answer"}, HUMANEVAL: {"prompt", "canonical_solution"}}
"""Columns by which rows of benchmarks without categories are known, by the category that they get."""


@dataclass(frozen=True)
class Prompt:
    """A prompt. category: empty if the file has none. chat: whether to put the text into the model's template. later:
    what the user says after the answer, and after the next ones. tools: functions that the model may call, as the chat
    completions API has them. system: the system message, if the file has one."""

    text: str
    category: str = ""
    chat: bool = False
    later: tuple[str, ...] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    system: str = ""

    @property
    def words(self) -> str:
        """The text after the system message and the functions in words, for a model without a template."""
        return "\n\n".join(part for part in (in_words(self.tools, self.system), self.text) if part)

    def put_into(self, chat: Callable[..., list[int]]) -> Callable[[str | Sequence[str]], list[int]]:
        return partial(chat, tools=self.tools, system=self.system) if self.tools or self.system else chat


def is_prompt_file(name: str) -> bool:
    """Whether the rows of a file are prompts, by its suffix."""
    return name == HUMANEVAL or Path(name).suffix in PROMPT_TABLES


def read(name: str, column: str | None = None) -> list[Prompt]:
    """Read every prompt of a file, in its order; rows without a prompt are left out. column: holds the prompts; None:
    the first of COLUMNS that a row has. Raises ConfigError where there is no such file, column or prompt."""
    prompts = []
    for row in rows(name):
        if not isinstance(row, Mapping):
            raise ConfigError(f"workload.prompts={name}: a row is no mapping of columns to values: {str(row)[:60]!r}")
        if column is None and _is_tool_question(row):
            if said := _said(row, "user"):
                tools, system = _tools(row, prompts_file(name)), "\n\n".join(_said(row, "system"))
                kind = re.split(r"_\d", str(row["id"]))[0]  # live_simple of live_simple_0-0-0
                prompts.append(Prompt(said[0], kind, True, tuple(said[1:]), tuple(tools), system))
            continue
        used = column or next((known for known in COLUMNS if known in row), None)
        if used is None or used not in row:
            wanted = f"load.column={column}" if column else f"a column {', '.join(COLUMNS)}"
            raise ConfigError(f"workload.prompts={name}: {wanted} is not in a row; its columns: {', '.join(row)}")
        content = row[used]
        if (text := _first_turn(content)) is not None and text.strip():
            task = next((name for name, columns in TASKS.items() if columns <= row.keys()), "")
            is_chat = bool(task) or used in CHATS or not isinstance(content, str)
            prompts.append(Prompt(text, str(row.get("category") or task), is_chat, _later_turns(content)))
    if not prompts:
        raise ConfigError(f"workload.prompts={name}: it holds no prompt")
    return prompts


def drawn(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """Draw at most `count` prompts, alternating over the categories; equal seeds give equal prompts."""
    draw, kinds = random.Random(seed), dict.fromkeys(prompt.category for prompt in prompts)
    by_category = [[prompt for prompt in prompts if prompt.category == kind] for kind in kinds]
    for category in by_category:
        draw.shuffle(category)
    chosen: list[Prompt] = []
    while len(chosen) < count and any(by_category):
        chosen += [category.pop() for category in by_category if category]
    return chosen[:count]


def encoded(
    prompts: Iterable[Prompt], encode: Callable[[str], list[int]], chat: Callable[..., list[int]] | None, most: int
) -> list[list[int]]:
    """Return the token ids of each prompt, cut to `most` tokens. Of a chat first functions are left out, then the
    question is cut: the template's end must stay. chat: puts a question into the model's template; None without one."""

    def ids_of(prompt: Prompt) -> list[int]:
        return encode(prompt.words) if not prompt.chat or chat is None else prompt.put_into(chat)(prompt.text)

    encoded_prompts = []
    for prompt in prompts:
        ids = ids_of(prompt)
        while len(ids) > most and prompt.tools:
            prompt = replace(prompt, tools=prompt.tools[:-1])
            ids = ids_of(prompt)
        while prompt.chat and chat is not None and len(ids) > most and len(prompt.text) > 1:
            prompt = replace(prompt, text=prompt.text[: max(1, len(prompt.text) - 2 * (len(ids) - most))])
            ids = ids_of(prompt)
        encoded_prompts.append(ids[:most])
    return encoded_prompts


def _first_turn(content: Any) -> str | None:
    """Return the user's first turn of a text, a list of texts, or a list of mappings (role, content), or None."""
    if isinstance(content, str):
        return content
    for turn in content if isinstance(content, Sequence) else ():
        if isinstance(turn, str):
            return turn
        if isinstance(turn, Mapping) and turn.get("role", turn.get("from")) in (*USERS, None):
            said = turn.get("content", turn.get("value"))
            if isinstance(said, str):
                return said
    return None


def _later_turns(content: Any) -> tuple[str, ...]:
    """Return the turns after the first of a list of texts; of mappings none, because answers stand between them."""
    is_texts = isinstance(content, Sequence) and not isinstance(content, str)
    return tuple(content[1:]) if is_texts and all(isinstance(turn, str) for turn in content) else ()


def rows(name: str, setting: str = "workload.prompts") -> Iterable[Any]:
    """Return the rows of a file as they are; raises ConfigError, which begins with the setting that names it."""
    path = prompts_file(name)
    try:
        if path.suffix == ".parquet":
            import pandas

            return json.loads(pandas.read_parquet(path).to_json(orient="records"))
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode("utf-8")
        if text.lstrip().startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ImportError as error:
        raise ConfigError(f"{setting}={name}: reading .parquet needs pyarrow; {install('data')}") from error
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{setting}={name}: it cannot be read as {path.suffix[1:]}: {reason}") from error


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
JSON_TYPES = (
    dict.fromkeys(("dict", "hashmap"), "object")
    | dict.fromkeys(("float", "double"), "number")
    | dict.fromkeys(("tuple", "arraylist", "array"), "array")
    | dict.fromkeys(("string", "char"), "string")
    | {"long": "integer", "boolean": "boolean"}
)
"""Types of JSON schema, by the lower-case name of a type of Python, Java or JavaScript in the files."""


def _is_tool_question(row: Mapping[str, Any]) -> bool:
    turns = row.get("question")
    return "id" in row and isinstance(turns, list) and bool(turns) and all(isinstance(turn, list) for turn in turns)


def _said(row: Mapping[str, Any], role: str) -> list[str]:
    """Return what a role says in each turn; turns without a word of it are left out."""
    turns = [[str(message["content"]) for message in turn if message["role"] == role] for turn in row["question"]]
    return ["\n\n".join(turn) for turn in turns if any(turn)]


def _tools(row: Mapping[str, Any], file: Path) -> list[dict[str, Any]]:
    """Return the functions of a row of `file` in the form of the chat completions API, with types of JSON schema;
    raises ConfigError where the functions of a class that the row names are not there."""
    functions = row.get("function")
    if functions is None:
        left_out = row.get("excluded_function", ())
        classes = [_functions_of_class(str(name), str(row["id"]), file) for name in row.get("involved_classes", ())]
        functions = [function for of_class in classes for function in of_class if function["name"] not in left_out]
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
