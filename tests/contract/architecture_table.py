"""The table of architectures in docs/limits.md, from what `tests/engine/architectures.py` wrote."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "engine" / "architectures.jsonl"

RAN = ("works", "refused", "wrong", "fails")
"""Verdicts on architectures that the plain engine runs."""

HEAD = """
### Architectures

Decoder-only architectures of vLLM's registry as tiny models of random weights on a CPU
(`tests/engine/architectures.py`): {asked} of {known} were asked, {made} of them can be made with transformers, and a
plain vLLM runs {ran} of these. With {works} of the {ran} early exit works: greedy output is the plain engine's, drafts
were made and some were accepted.

| what happens | with |
|---|---|
"""

WORDS = {
    "works": "works",
    "refused": "refused",
    "wrong": "another output than the plain engine's",
    "fails": "fails",
    "vllm": "a plain vLLM did not run the tiny model here",
    "no model": "transformers made no tiny model",
    "not asked": "not asked yet",
}


def lines(file: Path = FILE) -> list[dict[str, Any]]:
    """What was found, by name; of two lines with one name the later one."""
    found = [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]
    return sorted({one["name"]: one for one in found}.values(), key=lambda one: one["name"])


def section(found: Sequence[dict[str, Any]]) -> str:
    """The part of the page."""
    asked = [one for one in found if one["verdict"] != "not asked"]
    works = [one for one in asked if one["verdict"] == "works"]
    ran = [one for one in asked if one["verdict"] in RAN]
    made = [one for one in asked if one["verdict"] != "no model"]
    counts = {"known": found, "asked": asked, "made": made, "ran": ran, "works": works}
    rows: dict[str, list[str]] = {}
    for one in sorted(found, key=lambda one: list(WORDS).index(one["verdict"])):
        rows.setdefault(_what(one), []).append(one["name"])
    parts = [HEAD.format(**{name: len(ones) for name, ones in counts.items()})]
    return "".join([*parts, *(f"| {what} | {', '.join(names)} |\n" for what, names in rows.items())])


def _what(one: dict[str, Any]) -> str:
    """What happens with an architecture: on which of vLLM's models it works, and why we refuse it."""
    text = WORDS[one["verdict"]]
    if one["verdict"] == "works" and one["served_by"].startswith("Transformers"):
        return f"{text}, on vLLM's Transformers backend"
    return f"{text}: {_why(one)}" if one["verdict"] in ("refused", "fails") else text


def _why(one: dict[str, Any]) -> str:
    """The first part of the reason; of our refusals without the model's place."""
    text = one["reason"]
    if one["verdict"] == "refused":
        text = text.partition("is not supported with early exit")[2].lstrip(": ") or text
    return re.split("[;,] ", text)[0].replace("|", "\\|")[:200]
