"""Questions made of the held-out standard library, with nothing to download: two tasks for `selfspec eval`.

    stdlib_choice   which of four lines comes next: the module's own next line, or one of three other lines of the same
                    module with the same indentation
    stdlib_line     the rest of a line of code after its first word or later, to be generated exactly

They cannot be compared with published scores; baseline and arm answer the same questions. The embedded model has never
seen these modules. A model trained on public code has.
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
MOST = 1000  # questions of a task

Question = dict[str, Any]


def stdlib_choice(seed: int = 0) -> list[Question]:
    """Return questions with `context`, `choices` (each begins with a newline) and `answer`, the right index."""

    def question(draw: random.Random, right: str, alike: list[str]) -> Question | None:
        others = [line for line in draw.sample(alike, min(CHOICES, len(alike))) if line != right][: CHOICES - 1]
        if len(others) < CHOICES - 1:
            return None
        choices = [right, *others]
        draw.shuffle(choices)
        return {"choices": [f"\n{line}" for line in choices], "answer": choices.index(right)}

    return _questions(seed, question)


def stdlib_line(seed: int = 0) -> list[Question]:
    """Return questions with `context`, which ends inside a line, and `rest`, the remainder of that line."""

    def question(draw: random.Random, line: str, alike: list[str]) -> Question | None:
        # At the end of a word, where tokens of code begin. Two remaining characters could be guessed.
        cuts = [match.start() for match in re.finditer(r"(?<=\w)(?=[^\w])", line) if len(line) - match.start() > 2]
        if not cuts:
            return None
        cut = draw.choice(cuts)
        return {"begun": f"\n{line[:cut]}", "rest": line[cut:]}

    questions = _questions(seed, question)
    return [{"context": item["context"] + item["begun"], "rest": item["rest"]} for item in questions]


TASKS: dict[str, Callable[[int], list[Question]]] = {"stdlib_choice": stdlib_choice, "stdlib_line": stdlib_line}

Ask = Callable[[random.Random, str, list[str]], Question | None]
"""Makes a question about a line, given the lines of its module with the same indentation; None if it cannot."""


def _questions(seed: int, ask: Ask) -> list[Question]:
    """Return at most MOST questions; modules alternate, so that the first questions come from all of them."""
    draw = random.Random(seed)
    modules = [_module(draw, text, ask) for _, text in library.held_out_text()]
    draw.shuffle(modules)
    questions: list[Question] = []
    while modules and len(questions) < MOST:
        for module in list(modules):
            question = next(module, None)
            if question is None:
                modules.remove(module)
            else:
                questions.append(question)
    return questions[:MOST]


def _module(draw: random.Random, text: str, ask: Ask) -> Iterator[Question]:
    lines = [line.rstrip() for line in text.splitlines()]
    alike: dict[int, list[str]] = {}
    for line in sorted(filter(_is_code, set(lines))):
        alike.setdefault(_indent(line), []).append(line)
    places = [at for at in range(CONTEXT_LINES, len(lines)) if _is_code(lines[at])]
    draw.shuffle(places)
    for at in places:
        context = "\n".join(lines[at - CONTEXT_LINES : at])[-CONTEXT_CHARACTERS:]
        question = ask(draw, lines[at], alike[_indent(lines[at])]) if context.strip() else None
        if question is not None:
            yield question | {"context": context}


def _is_code(line: str) -> bool:
    """Whether a line has code: it is no comment and holds more than brackets."""
    return len(re.findall(r"\w", line)) >= 4 and not line.lstrip().startswith("#")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
