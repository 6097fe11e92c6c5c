"""The lines of code blocks in pages: what a reader types first."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"

COMMANDS = {
    "selfspec": r"selfspec ",
    "vllm": r"vllm serve ",
    "make": r"make ",
    "pip": r"pip install ",
    "curl": r"curl ",
}
"""Kinds of lines, and how each begins."""
_OUTPUT = re.compile(r"INFO ")


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a page, and of the commands that its sentences say to run."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    beside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    said = re.findall(r"`((?:pip install|make|selfspec (?:sweep|bench|report)) [^`]*)`", beside)
    return [*fenced, *(("", f"{command}\n") for command in said)]


def lines(*pages: Path) -> list[str]:
    """Every line of the blocks that are commands, without comments and without what a program prints."""
    found = []
    for page in pages:
        for language, text in blocks(page):
            if language:
                continue
            for line in text.splitlines():
                bare = re.sub(r"\s+#.*", "", line).strip()
                if bare and not bare.startswith("#") and not _OUTPUT.match(bare):
                    found.append(bare)
    return list(dict.fromkeys(found))


def of_kind(kind: str, *pages: Path) -> list[list[str]]:
    """The words of the commands of one kind."""
    return [shlex.split(line) for line in lines(*pages) if re.match(COMMANDS[kind], line)]


def overrides(words: Sequence[str]) -> list[str]:
    """Those of a command's words that are settings."""
    return [word for word in words if re.match(r"[\w.]+=", word)]


def python_blocks(*pages: Path) -> list[str]:
    """The blocks in Python."""
    return [text for page in pages for language, text in blocks(page) if language == "python"]
