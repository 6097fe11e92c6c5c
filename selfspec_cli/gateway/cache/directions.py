"""Whether two texts relate the same two things the other way round: "miles to km" and "km to miles".

Two steps. Where both texts state a relation in a form that is known ("from X to Y", "how many Y in X", "X than Y", "X
before Y"), the relations are compared. Otherwise two words that changed places, all others being where they were, are a
difference ("did Ali beat Frazier"), unless both texts relate things by a word that has no direction ("between",
"versus").
"""

from __future__ import annotations

import re

from selfspec_cli.gateway.cache.text import content, stem, tokens
from selfspec_cli.gateway.cache.words import FUNCTION_WORDS, MULTIPLIERS, SMALL_NUMBERS, UNITS

Relation = tuple[str, str]

_TOWARDS = {"to", "into", "towards"}
_ORDERED = {
    "than": False,
    "before": False,
    "after": True,
    "over": False,
    "above": False,
    "below": False,
    "behind": True,
}
_SYMMETRIC = {"between", "versus", "vs", "both"}


def _thing(word: str) -> str | None:
    """What a word names in a relation: a unit by its one name, any other word by its stem; None for function words."""
    if word in UNITS:
        return UNITS[word]
    if word in FUNCTION_WORDS or word[0].isdigit() or word in SMALL_NUMBERS or word in MULTIPLIERS or word in _ORDERED:
        return None
    return stem(word)


def _next(words: list[str], start: int, step: int) -> str | None:
    """The nearest thing from `start` on in steps of `step`; None where the text ends first."""
    position = start
    while 0 <= position < len(words):
        thing = _thing(words[position])
        if thing is not None:
            return thing
        position += step
    return None


def relations(text: str) -> set[Relation]:
    """The ordered pairs (from what, to what) that a text states in a known form."""
    words = [token.word for token in tokens(text)]
    found: set[Relation] = set()
    source = next((_next(words, i + 1, 1) for i, word in enumerate(words) if word == "from"), None)
    target = next((_next(words, i + 1, 1) for i, word in enumerate(words) if word in _TOWARDS), None)
    for i, word in enumerate(words):
        if word in _TOWARDS:
            begin = source if source is not None and source != target else _next(words, i - 1, -1)
            found.add((begin or "", _next(words, i + 1, 1) or ""))
        elif word in _ORDERED:
            # Which of the words before is compared is not parsed: each is paired with the one that follows.
            after = _next(words, i + 1, 1) or ""
            pairs = [(_thing(earlier) or "", after) for earlier in words[:i]]
            found.update(pair[::-1] if _ORDERED[word] else pair for pair in pairs)
        elif word == "in" and i > 0 and words[i - 1] in UNITS and _next(words, i + 1, 1) in UNITS.values():
            found.add((UNITS[words[i - 1]], _next(words, i + 1, 1) or ""))
    asked = re.search(r"\bhow (?:many|much) (\w+)", " ".join(words))
    if asked and asked[1] in UNITS:
        others = [UNITS[word] for word in words if word in UNITS and UNITS[word] != UNITS[asked[1]]]
        found |= {(other, UNITS[asked[1]]) for other in others[:1]}
    return {(a, b) for a, b in found if a and b and a != b}


def directions_differ(a: str, b: str) -> bool:
    """The texts relate two things that they share in opposite directions."""
    one, other = relations(a), relations(b)
    if any((y, x) in other for x, y in one):
        return True
    if one & other:
        return False
    words = {token.word for token in tokens(a)}, {token.word for token in tokens(b)}
    if words[0] & _SYMMETRIC and words[1] & _SYMMETRIC:
        return False
    first, second = content(a), content(b)
    if len(first) != len(second):
        return False
    moved = [i for i, (x, y) in enumerate(zip(first, second, strict=True)) if x != y]
    if any(word[0].isdigit() for i in moved for word in (first[i], second[i])):
        return False  # "July 9" and "9 July"
    return len(moved) == 2 and first[moved[0]] == second[moved[1]] and first[moved[1]] == second[moved[0]]
