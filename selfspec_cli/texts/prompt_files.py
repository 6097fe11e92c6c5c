"""Prompts from the rows of a file: ShareGPT, Spec-Bench, SPEED-Bench, MT-Bench, or JSONL of one's own.

A row's prompt is the first turn of its user. Rows of chats (`turns`, `conversations`, `messages`) are asked through the
model's chat template, where it has one; rows of text as they stand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec_cli.config.schema import PROMPT_TABLES, ConfigError
from selfspec_cli.extras import install

CHATS = ("turns", "conversations", "messages")
COLUMNS = (*CHATS, "prompt", "question", "text")
"""Of these the first that a row has, where the user names none."""
USERS = ("user", "human")


@dataclass(frozen=True)
class Prompt:
    """text: what is asked. category: empty where the file names none. chat: to be put into the model's template."""

    text: str
    category: str = ""
    chat: bool = False


def is_prompt_file(name: str) -> bool:
    """Whether a file's rows are prompts."""
    return Path(name).suffix in PROMPT_TABLES


def read(name: str, column: str | None = None, category: str = "category") -> list[Prompt]:
    """Every prompt of a file, in its order; rows without one are left out.

    Args:
        column: the one that holds the prompts; None takes the first of COLUMNS that a row has.
        category: the column that names a prompt's category, where there is one.

    Raises:
        ConfigError: the file cannot be read, has no such column, or no prompt.
    """
    found = []
    for row in _rows(Path(name).expanduser(), name):
        if not isinstance(row, Mapping):
            raise ConfigError(f"workload.prompts={name}: a row is no mapping of columns to values: {str(row)[:60]!r}")
        used = column or next((known for known in COLUMNS if known in row), None)
        if used is None or used not in row:
            wanted = f"load.column={column}" if column else f"a column {', '.join(COLUMNS)}"
            raise ConfigError(f"workload.prompts={name}: {wanted} is not in a row; its columns: {', '.join(row)}")
        content = row[used]
        if (text := _first_turn(content)) is not None and text.strip():
            found.append(Prompt(text, str(row.get(category) or ""), used in CHATS or not isinstance(content, str)))
    if not found:
        raise ConfigError(f"workload.prompts={name}: it holds no prompt")
    return found


def drawn(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """`count` prompts, the same ones for the same seed; alternating over the categories while they last.

    Fewer where the file holds fewer.
    """
    import random

    draw, kinds = random.Random(seed), dict.fromkeys(prompt.category for prompt in prompts)
    lists = [[prompt for prompt in prompts if prompt.category == kind] for kind in kinds]
    for one in lists:
        draw.shuffle(one)
    found: list[Prompt] = []
    while len(found) < count and any(lists):
        found += [one.pop() for one in lists if one]
    return found[:count]


def encoded(
    prompts: Iterable[Prompt], encode: Callable[[str], list[int]], chat: Callable[[str], list[int]] | None, most: int
) -> list[list[int]]:
    """Token ids of prompts, each at most `most` long: of a longer text the first tokens. A chat that is too long is
    asked with the beginning of its question, because the end of the template must stay.

    Args:
        chat: a question in the model's template; None for a model without one.
    """
    found = []
    for prompt in prompts:
        if prompt.chat and chat is not None:
            ids, text = chat(prompt.text), prompt.text
            while len(ids) > most and len(text) > 1:
                text = text[: max(1, len(text) - 2 * (len(ids) - most))]
                ids = chat(text)
        else:
            ids = encode(prompt.text)
        found.append(ids[:most])
    return found


def _first_turn(content: Any) -> str | None:
    """What the user says first: a text, a list of texts, or of mappings with who speaks and what is said."""
    if isinstance(content, str):
        return content
    for turn in content if isinstance(content, Sequence) else ():
        if isinstance(turn, str):
            return turn
        if isinstance(turn, Mapping):
            speaker = turn.get("role", turn.get("from"))
            said = turn.get("content", turn.get("value"))
            if speaker in (*USERS, None) and isinstance(said, str):
                return said
    return None


def _rows(path: Path, name: str) -> Iterable[Any]:
    try:
        if path.suffix == ".parquet":
            import pandas

            return json.loads(pandas.read_parquet(path).to_json(orient="records"))
        text = path.read_text(encoding="utf-8")
        lines = text.lstrip()
        if lines.startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ImportError as error:
        needed = f"reading .parquet needs pyarrow; {install('data')}"
        raise ConfigError(f"workload.prompts={name}: {needed}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"workload.prompts={name}: it cannot be read as {path.suffix[1:]}: "
                          f"{' '.join(str(error).split())[:200]}") from error  # fmt: skip
