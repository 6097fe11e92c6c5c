"""Questions for models: for chats, through the model's own chat template, and two tasks for `selfspec eval`.

The questions of chats ask for long answers, because end-of-text is ignored while measuring, and text after it is no
answer. General questions and coding tasks were written for this project. An edit asks for a function of the held-out
standard library with one change, so most of the answer repeats the prompt. A question about files follows as much of
the held-out standard library as the prompt has room for.

    stdlib_choice   which of four lines comes next: the module's own next line, or one of three other lines of the same
                    module with the same indentation
    stdlib_line     the rest of a line of code after its first word or later, to be generated exactly

The tasks cannot be compared with published scores; baseline and arm answer the same questions. The embedded model has
never seen these modules. A model trained on public code has.
"""

import ast
import json
import random
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any

from selfspec_cli.texts import library

_PROMPTS = json.loads(resources.files("selfspec_cli.texts").joinpath("chat.json").read_text(encoding="utf-8"))
QUESTIONS, CODING, EDITS, ABOUT_FILES = (tuple(_PROMPTS[kind]) for kind in ("chat", "coding", "edits", "files"))
EDITED_LINES = (14, 36)  # length of an edited function: long enough to be work, short enough to be answered
APART = 16  # questions between the first of one seed and the first of the next


def chosen(count: int, seed: int, kind: str = "chat") -> list[str]:
    """Return `count` questions of a kind of KINDS; the next seed has other questions, as long as there are any."""
    order = list(edits() if kind == "edits" else QUESTIONS if kind == "chat" else CODING)
    random.Random(0).shuffle(order)  # topics and tasks mixed
    return [order[(seed * APART + number) % len(order)] for number in range(count)]


KINDS = ("chat", "coding", "edits", "files")  # values of `workload.prompts` that mean questions


def no_template(name: str) -> str:
    return (
        f"model={name}: its tokenizer has no chat template, through which {', '.join(KINDS)} are asked; take "
        "workload.prompts=heldout, prose or random, or a file of text or of prompts, or name a tokenizer that has one: "
        "model.tokenizer=NAME"
    )


def asked(kind: str, count: int, seed: int, chat: Callable[[str], list[int]], most: int) -> list[list[int]]:
    """Return the token ids of `count` prompts of a kind of KINDS. chat: puts a question into the model's template ->
    token ids. most: tokens up to which prompts about files are filled; other prompts keep their length."""
    if kind != "files":
        return [chat(question) for question in chosen(count, seed, kind)]
    whole = "\n".join(f"# ---- {name}\n{text}" for name, text in library.held_out_text())
    # Each prompt begins at another place, so that no two share a prefix; the text wraps around.
    starts = [(seed * APART + number * (len(whole) // count)) % len(whole) for number in range(count)]
    return [
        _about_files(whole[start:] + whole[:start], ABOUT_FILES[number % len(ABOUT_FILES)], chat, most)
        for number, start in enumerate(starts)
    ]


def _about_files(text: str, question: str, chat: Callable[[str], list[int]], most: int) -> list[int]:
    """Return the token ids of a question after as much of `text` as fits: 0.99 `most` to `most` tokens."""
    fitting, size = chat(question), 4 * most
    for _ in range(8):  # code has two to five characters a token, so a few corrections are enough
        ids = chat(f"Here are files of a library:\n\n```python\n{text[:size]}\n```\n\n{question}")
        fitting = ids if len(fitting) < len(ids) <= most else fitting
        if 0.99 * most <= len(ids) <= most:
            break
        size = int(size * 0.995 * most / len(ids))
    return fitting


@cache
def edits() -> Sequence[str]:
    """Return requests that each ask to change one function of the held-out standard library, with its source."""
    requests: list[str] = []
    low, high = EDITED_LINES
    for _, text in library.held_out_text():
        of_module = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or node.decorator_list:
                continue
            lines = of_module[node.lineno - 1 : node.end_lineno]
            if low <= len(lines) <= high:
                source = textwrap.dedent("\n".join(lines))
                task = EDITS[len(requests) % len(EDITS)].format(name=node.name)
                requests.append(
                    f"Here is a Python function:\n\n```python\n{source}\n```\n\n{task} Answer with the whole function."
                )
    return requests


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
            if (question := next(module, None)) is None:
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
        if context.strip() and (question := ask(draw, lines[at], alike[_indent(lines[at])])) is not None:
            yield question | {"context": context}


def _is_code(line: str) -> bool:
    """Whether a line has code: it is no comment and holds more than brackets."""
    return len(re.findall(r"\w", line)) >= 4 and not line.lstrip().startswith("#")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
