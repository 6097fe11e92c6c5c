"""Argument types for scripts of experiments/, whose errors name the allowed values and the nearest spelling."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.early_exit.errors import closest

T = TypeVar("T")


def among(allowed: Iterable[str], noun: str) -> Callable[[str], str]:
    """Return an argparse type: one of `allowed`."""
    names = list(allowed)

    def checked(word: str) -> str:
        if word not in names:
            raise argparse.ArgumentTypeError(closest(word, names, noun))
        return word

    return checked


def all_among(allowed: Iterable[str], noun: str) -> Callable[[str], list[str]]:
    """Return an argparse type: values of `allowed`, separated by commas."""
    checked = among(allowed, noun)
    return lambda text: [checked(word) for word in text.split(",")]


def existing(word: str) -> Path:
    """Return the path of an existing file or folder, also in an archive of results; a type for argparse."""
    from selfspec_cli.record import archive

    path = Path(word)
    packed = archive.inside(path)
    if not (path.exists() or archive.is_folder(path) or (packed and path in archive.contents(packed[0]))):
        raise argparse.ArgumentTypeError(f"there is no file or folder {word!r}")
    return path


def one_run(parser: argparse.ArgumentParser, words: list[str]) -> RunConfig:
    """Return the point that these settings describe; a wrong setting ends the script as it ends the command."""
    from selfspec_cli.config.compose import compose_runs

    try:
        (cfg,) = compose_runs(None, words, sweep=False)
    except ConfigError as error:
        parser.error(str(error))
    return cfg


def numbers(text: str) -> list[int]:
    """Return whole numbers, separated by commas; a type for argparse."""
    return _all(int, text, "whole numbers", "1,8,32")


def decimals(text: str) -> list[float]:
    """Return numbers, separated by commas; a type for argparse."""
    return _all(float, text, "numbers", "0,0.8")


def _all(kind: Callable[[str], T], text: str, what: str, example: str) -> list[T]:
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write {what} with commas between them: {example}") from None
