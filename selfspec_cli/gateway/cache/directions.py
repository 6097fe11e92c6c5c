"""Whether two texts relate the same two things the other way round: "miles to km" and "km to miles".

Two steps. Where both texts state a relation in a form that is known ("from X to Y", "how many Y in X", "X than Y", "X
before Y"), the relations are compared. Otherwise two words that changed places, all others being where they were, are a
difference ("did Ali beat Frazier"), unless both texts relate things by a word that has no direction ("between",
"versus").
"""

from __future__ import annotations

import re
from itertools import product

from selfspec_cli.gateway.cache.text import content, places, stem, tokens
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
# (what ends with one thing, and what begins with the other; whether the other is the one that is replaced)
_REPLACING = (
    (r"(?P<a>.*?\b(?:replace|replacing|swap|exchange|substitute)\b.+?) (?:with|by|for) (?P<b>.*)", False),
    (
        r"(?P<a>.*?) (?:in place of|instead of|rather than|(?:a )?(?:good )?(?:substitute|replacement) for) (?P<b>.*)",
        True,
    ),
)
_SYMMETRIC = {"between", "versus", "vs", "both"}


def _thing(word: str) -> str | None:
    """What a word names in a relation: a unit by its one name, any other word by its stem; None for function words."""
    if word in UNITS:
        return UNITS[word]
    if word in FUNCTION_WORDS or word[0].isdigit() or word in SMALL_NUMBERS or word in MULTIPLIERS or word in _ORDERED:
        return None
    return stem(word)


def _near(words: list[str], start: int, step: int) -> set[str]:
    """The nearest thing from `start` on in steps of `step`, and the one right behind it: "olive oil"."""
    position = start
    while 0 <= position < len(words):
        thing = _thing(words[position])
        if thing is not None:
            behind = position + step
            second = _thing(words[behind]) if 0 <= behind < len(words) else None
            return {thing} | ({second} if second else set())
        position += step
    return set()


def relations(text: str) -> set[Relation]:
    """The ordered pairs (from what, to what) that a text states in a known form."""
    words = [token.word for token in tokens(text)]
    found: set[Relation] = set()
    source = next((_near(words, i + 1, 1) for i, word in enumerate(words) if word == "from"), set())
    target = next((_near(words, i + 1, 1) for i, word in enumerate(words) if word in _TOWARDS), set())
    for i, word in enumerate(words):
        after = _near(words, i + 1, 1)
        if word in _TOWARDS:
            found |= set(product(source if source and source != target else _near(words, i - 1, -1), after))
        elif word in _ORDERED:
            # Which of the words before is compared is not parsed: each is paired with the one that follows.
            before = {thing for thing in map(_thing, words[:i]) if thing}
            found |= set(product(after, before) if _ORDERED[word] else product(before, after))
        elif word == "in" and i > 0 and words[i - 1] in UNITS:
            found |= {(UNITS[words[i - 1]], thing) for thing in after if thing in UNITS.values()}
    for pattern, turned in _REPLACING:
        if match := re.search(pattern, " ".join(words)):
            old, new = _near(words, len(match["a"].split()) - 1, -1), _near(match["b"].split(), 0, 1)
            found |= set(product(new, old) if turned else product(old, new))
    asked = re.search(r"\bhow (?:many|much) (\w+)", " ".join(words))
    if asked and asked[1] in UNITS:
        others = [UNITS[word] for word in words if word in UNITS and UNITS[word] != UNITS[asked[1]]]
        found |= {(other, UNITS[asked[1]]) for other in others[:1]}
    return {(a, b) for a, b in found if a != b}


def _ends(text: str) -> tuple[set[str], set[str]]:
    """What a text goes from, and what it goes to."""
    words = [token.word for token in tokens(text)]
    after = [(word, _near(words, i + 1, 1)) for i, word in enumerate(words)]
    sources = {thing for word, things in after if word == "from" for thing in things}
    return sources, {thing for word, things in after if word in _TOWARDS for thing in things}


def directions_differ(a: str, b: str) -> bool:
    """The texts relate two things that they share in opposite directions."""
    one, other = relations(a), relations(b)
    if any((y, x) in other for x, y in one):
        return True
    (a_from, a_to), (b_from, b_to) = _ends(a), _ends(b)
    if not (a_from and a_to) and not (b_from and b_to) and (a_from & b_to or b_from & a_to):
        return True  # "a bus to the zoo" and "a bus from the zoo"
    if _exchanged(a, b, "number"):
        return True
    if one & other:
        return False
    words = {token.word for token in tokens(a)}, {token.word for token in tokens(b)}
    if words[0] & _SYMMETRIC and words[1] & _SYMMETRIC:
        return False
    return _exchanged(a, b, "name") or _exchanged(a, b, "unit") or _two_exchanged(a, b)


def _exchanged(a: str, b: str, kind: str) -> bool:
    """Two words of a kind that both texts have (`text.places`) stand the other way round in the second."""
    first, second = places(a), places(b)
    shared = [word for word, (_, its) in first.items() if word in second and its.startswith(kind)]
    return any(
        first[one][1] == first[other][1] and (first[one][0] < first[other][0]) != (second[one][0] < second[other][0])
        for i, one in enumerate(shared)
        for other in shared[i + 1 :]
    )


def _two_exchanged(a: str, b: str) -> bool:
    """Two words of one kind changed places, and every other word is where it was."""
    first, second = content(a), content(b)
    if len(first) != len(second):
        return False
    moved = [i for i, (x, y) in enumerate(zip(first, second, strict=True)) if x != y]
    if len(moved) != 2 or (first[moved[0]], first[moved[1]]) != (second[moved[1]], second[moved[0]]):
        return False
    kinds = {word: kind for word, (_, kind) in places(a).items()}
    return kinds.get(first[moved[0]]) == kinds.get(first[moved[1]])
