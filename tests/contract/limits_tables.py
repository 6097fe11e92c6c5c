"""The tables of docs/limits.md that are generated: architectures, from what `tests/engine/architectures.py` wrote, and
fields of a request, from those that the tests of both runners ask for."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).parents[1] / "engine"
RAN = ("works", "refused", "wrong", "fails")
"""Verdicts on architectures that the plain engine runs."""

ARCHITECTURES = """
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


def architectures() -> str:
    """The part of the page; of two lines with one name the later one counts."""
    lines = [json.loads(text) for text in (ENGINE / "architectures.jsonl").read_text(encoding="utf-8").splitlines()]
    found = sorted({one["name"]: one for one in lines}.values(), key=lambda one: one["name"])
    asked = [one for one in found if one["verdict"] != "not asked"]
    works = [one for one in asked if one["verdict"] == "works"]
    ran = [one for one in asked if one["verdict"] in RAN]
    made = [one for one in asked if one["verdict"] != "no model"]
    counts = {"known": found, "asked": asked, "made": made, "ran": ran, "works": works}
    rows: dict[str, list[str]] = {}
    for one in sorted(found, key=lambda one: list(WORDS).index(one["verdict"])):
        rows.setdefault(_what(one), []).append(one["name"])
    parts = [ARCHITECTURES.format(**{name: len(ones) for name, ones in counts.items()})]
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


# ---- fields of a request --------------------------------------------------------------------------------------------


FIELDS = """
### Fields of a request

Fields of vLLM's SamplingParams, in one batch with all others: with drafts, without any by load (a table of lengths) and
by request (`selfspec_k` 0). "yes": each time the answer, with its log-probabilities, is a plain engine's.
`temperature`, `top_p`, `top_k` and `min_p` were asked for so that one token is left; for the distribution see
`tests/engine/test_sampling.py` and `tests/engine/v2/test_v2_sampling.py`.

| field | V1, on a CPU | V2, in Triton's interpreter | what to know |
|---|---|---|---|
"""


def fields() -> str:
    """The part of the page."""
    known = runpy.run_path(str(ENGINE / "request_fields.py"))
    rows = dict.fromkeys(known["FIELDS"], ("yes", "yes"))
    rows |= dict.fromkeys(known["V2_FIELDS"], ("refused", "yes"))
    rows |= {name: ("refused", "refused") for name in known["REFUSED"] if name not in known["V2_FIELDS"]}
    notes: dict[str, str] = known["NOTES"]
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name in sorted(rows):
        alike.setdefault((*rows[name], notes.get(name, "")), []).append(name)
    return FIELDS + "".join(_line(names, *said) for said, names in alike.items())


def named_fields() -> set[str]:
    """The fields that the section names."""
    lines = fields().splitlines()[FIELDS.count("\n") :]
    return {name for line in lines for name in line.split(" | ")[0].strip("| ").split(", ")}


def _line(names: list[str], on_v1: str, on_v2: str, note: str) -> str:
    return f"| {', '.join(names)} | {on_v1} | {on_v2} | {note} |\n"
