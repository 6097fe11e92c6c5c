"""The table of architectures in docs/compatibility.md, from what `tests/engine/architectures.py` wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "engine" / "architectures.jsonl"

RAN = ("works", "refused", "wrong", "fails")
"""Verdicts on architectures that the plain engine runs."""

HEAD = """
## Architectures

Each decoder-only architecture of vLLM's registry, as a tiny model of random weights on a CPU: {made} of {known} can be
made with transformers, and a plain vLLM runs {ran} of these here. With {works} of the {ran} early exit works: greedy
output is the plain engine's, drafts were made and some were accepted. `python tests/engine/architectures.py --out
tests/engine/architectures.jsonl` asks them all.

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
    "vllm": "a plain vLLM cannot run it on a CPU",
    "no model": "not tried",
}


def lines(file: Path = FILE) -> list[dict[str, Any]]:
    """What was found, by name."""
    return sorted(
        (json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()), key=lambda one: one["name"]
    )


def section(found: Sequence[dict[str, Any]]) -> str:
    """The part of the page."""
    works = [one for one in found if one["verdict"] == "works"]
    ran = [one for one in found if one["verdict"] in RAN]
    made = [one for one in found if one["verdict"] != "no model"]
    parts = [HEAD.format(known=len(found), made=len(made), ran=len(ran), works=len(works))]
    parts += [f"| {one['name']} | {one['served_by']} | {one['layers']} | {one['accepted']} of {one['drafted']} |\n"
              for one in works]  # fmt: skip
    rest = [one for one in found if one["verdict"] not in ("works", "no model")]
    parts += [REST, *(f"| {one['name']} | {WORDS[one['verdict']]} | {_why(one)} |\n" for one in rest)]
    absent = [one["name"] for one in found if one["verdict"] == "no model"]
    return "".join([*parts, f"\nNo tiny model of these could be made with transformers: {', '.join(absent)}.\n"])


def _why(one: dict[str, Any]) -> str:
    """The reason in one cell; of our refusals what comes before the advice, without the model's place."""
    text = one["reason"]
    if one["verdict"] == "refused":
        text = text.partition("is not supported with early exit")[2].lstrip(": ") or text
    return text.partition("; ")[0].replace("|", "\\|")[:200]
