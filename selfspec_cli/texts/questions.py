"""Questions made of the held-out standard library, with nothing to download: two tasks for `selfspec eval`.

    stdlib_choice   which of four lines comes next: the module's own next line, or one of three other lines of the same
                    module with the same indentation
    stdlib_line     the rest of a line of code, from after its first word or later, to be generated and equal to the
                    letter

They have no meaning beside published scores; baseline and arm answer the same ones. The embedded model has never seen
these modules. A model trained on public code has.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

from selfspec_cli.texts import library

CONTEXT_LINES = 16
CONTEXT_CHARACTERS = 800  # at most: about 250 tokens of code
CHOICES = 4
MOST = 1000  # questions of a task; far more than anybody asks for

Question = dict[str, Any]


def stdlib_choice(seed: int = 0) -> list[Question]:
    """Questions with `context`, `choices` (of which each begins with a newline) and `answer`, the index of the right
    one."""

    def question(draw: random.Random, right: str, alike: list[str]) -> Question | None:
        others = [line for line in draw.sample(alike, min(CHOICES, len(alike))) if line != right][: CHOICES - 1]
        if len(others) < CHOICES - 1:
            return None
        choices = [right, *others]
        draw.shuffle(choices)
        return {"choices": [f"\n{line}" for line in choices], "answer": choices.index(right)}

    return _questions(seed, question)


def stdlib_line(seed: int = 0) -> list[Question]:
    """Questions with `context`, which ends inside a line, and `rest`, what stands on that line after it."""

    def question(draw: random.Random, line: str, alike: list[str]) -> Question | None:
        # Between a word and what is no word, where tokens of code begin. Two characters can be guessed.
        cuts = [found.start() for found in re.finditer(r"(?<=\w)(?=[^\w])", line) if len(line) - found.start() > 2]
        if not cuts:
            return None
        cut = draw.choice(cuts)
        return {"begun": f"\n{line[:cut]}", "rest": line[cut:]}

    return [{"context": one["context"] + one["begun"], "rest": one["rest"]} for one in _questions(seed, question)]


TASKS: dict[str, Callable[[int], list[Question]]] = {"stdlib_choice": stdlib_choice, "stdlib_line": stdlib_line}


Ask = Callable[[random.Random, str, list[str]], Question | None]
"""A question about a line, given the lines of its module with the same indentation; None where it makes none."""


def _questions(seed: int, ask: Ask) -> list[Question]:
    """At most MOST questions; modules take turns, so that the first ones come from all of them."""
    draw = random.Random(seed)
    modules = [_module(draw, text, ask) for _, text in library.held_out_text()]
    draw.shuffle(modules)
    found: list[Question] = []
    while modules and len(found) < MOST:
        for module in list(modules):
            one = next(module, None)
            if one is None:
                modules.remove(module)
            else:
                found.append(one)
    return found[:MOST]


def _module(draw: random.Random, text: str, ask: Ask) -> Iterator[Question]:
    lines = [line.rstrip() for line in text.splitlines()]
    alike: dict[int, list[str]] = {}
    for line in sorted({line for line in lines if _is_code(line)}):
        alike.setdefault(_indent(line), []).append(line)
    places = [at for at in range(CONTEXT_LINES, len(lines)) if _is_code(lines[at])]
    draw.shuffle(places)
    for at in places:
        context = "\n".join(lines[at - CONTEXT_LINES : at])[-CONTEXT_CHARACTERS:]
        question = ask(draw, lines[at], alike[_indent(lines[at])]) if context.strip() else None
        if question is not None:
            yield question | {"context": context}


def _is_code(line: str) -> bool:
    """Whether there is something to say on a line: no comment, and not brackets alone."""
    return len(re.findall(r"\w", line)) >= 4 and not line.lstrip().startswith("#")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
