"""The error for a setting that cannot be honoured, how a misspelt word is answered, and any error on one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SettingsError(ValueError):
    """A setting that cannot be honoured; the message names the value and what is allowed."""


def closest(
    word: object, allowed: Iterable[str], noun: str = "value", meant: str | None = None, further: str = ""
) -> str:
    """One line for a word that is not in `allowed`: what it was, what is allowed, and the nearest right spelling.

    meant: what it must have meant, where that is known better than by spelling. further: what is allowed besides.

    >>> closest("varh", ["none", "varH"], "gate")
    "gate 'varh' is not known; allowed: none, varH; did you mean 'varH'?"
    """
    names = list(allowed)
    message = f"{noun} {word!r} is not known; allowed: {', '.join(names)}{further}"
    meant = meant or nearest(word, names)
    return f"{message}; did you mean {meant!r}?" if meant else message


def nearest(word: object, allowed: Iterable[str], alike: float = 0.5) -> str | None:
    """The word of `allowed` that is spelt most like `word`; None where none is so much `alike`, 0 to 1."""
    by_lower = {name.lower(): name for name in allowed}
    near = difflib.get_close_matches(str(word).lower(), by_lower, n=1, cutoff=alike)
    return by_lower[near[0]] if near else None


def on_one_line(error: BaseException) -> str:
    """What an error says; its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
