"""The tables of docs/limits.md about architectures and about the fields of a request."""

from __future__ import annotations

import json
import re
import runpy
from typing import Any

from figure_cells import ROOT, table

ENGINE = ROOT / "tests" / "engine"
ASKED = runpy.run_path(str(ENGINE / "request_fields.py"))
RAN = ("works", "refused", "wrong", "fails")
"""Verdicts on architectures that the plain engine runs."""
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
    """Write what happens with which architecture, from what tests/engine/architectures.py wrote."""
    lines = [json.loads(text) for text in (ENGINE / "architectures.jsonl").read_text(encoding="utf-8").splitlines()]
    latest = {one["name"]: one for one in lines}  # of two lines with one name the later one counts
    found = [latest[name] for name in sorted(latest)]
    asked = [one for one in found if one["verdict"] != "not asked"]
    made = [one for one in asked if one["verdict"] != "no model"]
    ran = [one for one in asked if one["verdict"] in RAN]
    works = [one for one in asked if one["verdict"] == "works"]
    names: dict[str, list[str]] = {}
    for one in sorted(found, key=lambda one: list(WORDS).index(one["verdict"])):
        names.setdefault(_what(one), []).append(one["name"])
    return (
        "Decoder-only architectures of vLLM's registry as tiny models of random weights on a CPU\n"
        f"(`tests/engine/architectures.py`): {len(asked)} of {len(found)} were asked, {len(made)} of them can be made "
        f"with transformers, and a\nplain vLLM runs {len(ran)} of these. With {len(works)} of the {len(ran)} early "
        "exit works: greedy output is the plain engine's, drafts\nwere made and some were accepted.\n\n"
        f"{table(('what happens', 'with'), [(what, ', '.join(those)) for what, those in names.items()])}"
    )


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
    return re.split("[;,] ", text)[0][:200]


def fields() -> str:
    """Write which fields of vLLM's SamplingParams work on which runner."""
    verdicts = dict.fromkeys(ASKED["FIELDS"], ("yes", "yes")) | dict.fromkeys(ASKED["REFUSED"], ("refused", "refused"))
    verdicts |= dict.fromkeys(ASKED["V2_FIELDS"], ("refused", "yes"))
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name in sorted(verdicts):
        alike.setdefault((*verdicts[name], ASKED["NOTES"].get(name, "")), []).append(name)
    header = ("field", "V1, on a CPU", "V2, in Triton's interpreter", "what to know")
    return table(header, [(", ".join(names), *said) for said, names in alike.items()])
