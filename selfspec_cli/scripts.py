"""How the scripts of experiments/ answer a wrong word: what is allowed, the nearest right spelling, exit code 2."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.early_exit.errors import closest

T = TypeVar("T")


def among(allowed: Iterable[str], noun: str) -> Callable[[str], str]:
    """A type for argparse: one word of `allowed`."""
    names = list(allowed)

    def known(word: str) -> str:
        if word not in names:
            raise argparse.ArgumentTypeError(closest(word, names, noun))
        return word

    return known


def all_among(allowed: Iterable[str], noun: str) -> Callable[[str], list[str]]:
    """A type for argparse: words of `allowed` with commas between them."""
    known = among(allowed, noun)
    return lambda text: [known(word) for word in text.split(",")]


def existing(word: str) -> Path:
    """A type for argparse: a file or a folder that there is, also one in an archive of results."""
    from selfspec_cli.record import archive

    path = Path(word)
    packed = archive.inside(path)
    if not (path.exists() or archive.is_folder(path) or (packed and path in archive.contents(packed[0]))):
        raise argparse.ArgumentTypeError(f"there is no file or folder {word!r}")
    return path


def one_run(parser: argparse.ArgumentParser, words: list[str]) -> RunConfig:
    """The point that these words of `selfspec` describe; a wrong word ends the script as it ends the command."""
    from selfspec_cli.config.compose import compose_runs

    try:
        (cfg,) = compose_runs(None, words, sweep=False)
    except ConfigError as error:
        parser.error(str(error))
    return cfg


def numbers(text: str) -> list[int]:
    """A type for argparse: whole numbers with commas between them."""
    return _all(int, text, "whole numbers", "1,8,32")


def decimals(text: str) -> list[float]:
    """A type for argparse: numbers with commas between them."""
    return _all(float, text, "numbers", "0,0.8")


def _all(kind: Callable[[str], T], text: str, what: str, example: str) -> list[T]:
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write {what} with commas between them: {example}") from None
