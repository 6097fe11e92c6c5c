"""The table of architectures in docs/limits.md, from what `tests/engine/architectures.py` wrote."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "engine" / "architectures.jsonl"

RAN = ("works", "refused", "wrong", "fails")
"""Verdicts on architectures that the plain engine runs."""

HEAD = """
### Architectures

Each decoder-only architecture of vLLM's registry, as a tiny model of random weights on a CPU: {asked} of {known} were
asked, {made} of them can be made with transformers, and a plain vLLM runs {ran} of these here. With {works} of the
{ran} early exit works: greedy output is the plain engine's, drafts were made and some were accepted. `python
tests/engine/architectures.py --out tests/engine/architectures.jsonl` asks all that were not asked yet.

| architecture | vLLM's class | its layers | accepted of drafted |
|---|---|---|---|
"""

REST = """
Those that do not work, or could not be tried:

| architecture | what happens | why |
|---|---|---|
"""

WORDS = {
    "refused": "refused",
    "wrong": "another output than the plain engine's",
    "fails": "fails",
    "vllm": "a plain vLLM did not run this tiny model here",
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
    parts = [HEAD.format(**{name: len(ones) for name, ones in counts.items()})]
    parts += [
        f"| {one['name']} | {one['served_by']} | {one['layers']} | {one['accepted']} of {one['drafted']} |\n"
        for one in works
    ]
    rest = [one for one in made if one["verdict"] != "works"]
    parts += [REST, *(f"| {one['name']} | {WORDS[one['verdict']]} | {_why(one)} |\n" for one in rest)]
    absent = ", ".join(one["name"] for one in asked if one["verdict"] == "no model")
    parts.append(f"\nNo tiny model of these could be made with transformers: {absent}.\n")
    later = ", ".join(one["name"] for one in found if one["verdict"] == "not asked")
    return "".join([*parts, f"\nNot asked yet: {later}.\n" if later else ""])


def _why(one: dict[str, Any]) -> str:
    """The reason in one cell; of our refusals what comes before the advice, without the model's place."""
    text = one["reason"]
    if one["verdict"] == "refused":
        text = text.partition("is not supported with early exit")[2].lstrip(": ") or text
    return text.partition("; ")[0].replace("|", "\\|")[:200]
