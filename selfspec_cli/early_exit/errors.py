"""The error for a setting that cannot be honoured, how a misspelt word is answered, and any error on one line."""

import difflib
from collections.abc import Iterable


class SettingsError(ValueError):
    """A setting that cannot be honoured; the message names the value and what is allowed."""


class HeadError(SettingsError):
    """An exit head that cannot be used; the message says which and why."""


def closest(
    word: object, allowed: Iterable[str], noun: str = "value", meant: str | None = None, further: str = ""
) -> str:
    """One line for a word that is not in `allowed`: what it was, what is allowed, and the nearest right spelling.
    meant: what it must have meant, where that is known otherwise. further: what else is allowed.
    >>> closest("varh", ["none", "varH"], "gate")
    "gate 'varh' is not known; allowed: none, varH; did you mean 'varH'?"
    """
    names = list(allowed)
    message = f"{noun} {word!r} is not known; allowed: {', '.join(names)}{further}"
    near = [meant] if meant else equally_near(word, names)
    return f"{message}; did you mean {' or '.join(map(repr, near))}?" if near else message


def nearest(word: object, allowed: Iterable[str], alike: float = 0.5) -> str | None:
    """The word of `allowed` that is spelt most like `word`; None where none has the ratio `alike`, 0 to 1."""
    return next(iter(equally_near(word, allowed, alike)), None)


def equally_near(word: object, allowed: Iterable[str], alike: float = 0.5) -> list[str]:
    """The word of `allowed` spelt most like `word`, or up to three (int3: int4, int8), with a ratio of `alike`."""
    matcher = difflib.SequenceMatcher(b=str(word).lower())
    ratios = {}
    for name in allowed:
        matcher.set_seq1(name.lower())
        ratios[name] = matcher.ratio()
    best = max(ratios.values(), default=0.0)
    near = [name for name, ratio in ratios.items() if ratio == best]
    return near if best >= alike and len(near) <= 3 else near[:1] if best >= alike else []


def on_one_line(error: BaseException) -> str:
    """What an error says; its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
