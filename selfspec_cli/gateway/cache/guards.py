"""Whether two questions that lie close together ask for different things, by what embeddings are known to miss.

An encoder puts "5 km in miles" and "5 miles in km" at a cosine of 0.99. Each guard looks at one kind of such
differences and knows nothing of similarity. Guards err on the side of a difference: a wrong catch costs a hit, a missed
one is left to the thresholds of the entries. English only; words of another language pass all but numbers, dates and
code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from functools import lru_cache

from selfspec_cli.gateway.cache.directions import directions_differ
from selfspec_cli.gateway.cache.text import Token, content, stem, tokens
from selfspec_cli.gateway.cache.words import (
    ASKS,
    DAY_WORDS,
    FUNCTION_WORDS,
    MONTHS,
    MULTIPLIERS,
    NEGATIONS,
    ONLY_AFTER_A_NUMBER,
    OPENERS,
    OPPOSITES,
    REVERSED,
    SMALL_NUMBERS,
    TIME_UNITS,
    UNITS,
)

_FENCED = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)
_CODE = re.compile(
    r"```(?:\w*\n)?(?P<block>.*?)```"
    r"|`(?P<span>[^`]+)`"
    r"|(?P<bare>(?<![\w-])--?[a-zA-Z][\w-]*"  # a flag of a command
    r"|\b\w*[a-z0-9]_\w+|\b[a-z]+[a-z0-9]*[A-Z]\w*|\b\w+(?:\.\w+)*\(\w*\)|\b[a-z_]\w*(?:\.[a-z_]\w*)+\b"
    r"|[=!<>]=|&&|\|\||[<>]|\+\+|\*\*|\.[a-z]{1,5}\b|\b[A-Za-z]\+\+|\b[A-Z]#)",
    re.DOTALL,
)
_ISO_DATE = re.compile(r"\b(\d{4})-(\d{1,2})-(\d{1,2})\b")
_ORDINAL = re.compile(r"\b(\d+)(?:st|nd|rd|th)\b")


def _plain(text: str) -> str:
    """The text without code and without dates in ISO form, and with ordinals as numbers."""
    return _ORDINAL.sub(r"\1", _ISO_DATE.sub(" ", _FENCED.sub(" ", text)))


def _number(word: str) -> float | None:
    if word[0].isdigit():
        try:
            return float(word.replace(",", "")) if ":" not in word else None
        except ValueError:  # 3.11.7: a version, compared as it is written
            return None
    value = SMALL_NUMBERS.get(word)
    return None if value is None else float(value)


@lru_cache(maxsize=4096)
def numbers(text: str) -> Hashable:
    """The values that a text names, in digits or words, sorted; times and versions as they are written."""
    values: list[float | str] = []
    joined = False  # the last token was a number in words or digits: "two hundred", "twenty five"
    for token in tokens(_plain(text)):
        value = _number(token.word)
        if token.word in MULTIPLIERS:
            scale = MULTIPLIERS[token.word]
            if joined and isinstance(values[-1], float):
                values[-1] *= scale
            else:
                values.append(float(scale))
            joined = True
        elif value is not None:
            last = values[-1] if joined else None
            small = not token.word[0].isdigit() and value > 0
            if (
                isinstance(last, float)
                and small
                and ((last % 100 >= 20 and value < 10) or (last >= 100 > value and last % 100 == 0))
            ):
                values[-1] = last + value
            else:
                values.append(value)
            joined = True
        elif token.word[0].isdigit():
            values.append(token.word)
            joined = False
        else:
            joined = False
    return tuple(
        sorted(map(str, values + [float(part) for day in _ISO_DATE.findall(text) for part in (day[0], day[2])]))
    )


@lru_cache(maxsize=4096)
def units(text: str) -> frozenset[str]:
    """The units that a text names, by one name each ("km", "kilometres"); those of time only after a number or where
    they are what is asked for ("how many minutes", "in hours"), because "the day" and "a week" are seldom units.
    """
    found = set()
    before: Token | None = None
    for token in tokens(_plain(text)):
        unit = UNITS.get(token.word)
        after_number = before is not None and (_number(before.word) is not None or before.word in MULTIPLIERS)
        asked_for = before is not None and before.word in ("many", "in", "into", "to")
        doubtful = token.word in ONLY_AFTER_A_NUMBER or (unit in TIME_UNITS and not asked_for)
        if unit is not None and (after_number or not doubtful):
            found.add(unit)
        elif after_number and token.written in ("m", "C", "F", "K"):
            found.add({"m": "metre", "C": "celsius", "F": "fahrenheit", "K": "kelvin"}[token.written])
        before = token
    return frozenset(found)


def units_differ(a: str, b: str) -> bool:
    """Both texts name units, and not the same ones."""
    return bool(units(a) and units(b)) and units(a) != units(b)


@lru_cache(maxsize=4096)
def dates(text: str) -> Hashable:
    """Months, days of the week, seasons, holidays and times of day that a text names, each once."""
    plain = tokens(_FENCED.sub(" ", text))
    found = {
        MONTHS[t.word]
        for t in plain
        if t.word in MONTHS and (t.word not in ("may", "march") or (t.written[0].isupper() and not t.opens))
    }
    found |= {DAY_WORDS[token.word] for token in plain if token.word in DAY_WORDS}
    names = list(dict.fromkeys(MONTHS.values()))
    found |= {names[int(month) - 1] for _, month, _ in _ISO_DATE.findall(text) if 1 <= int(month) <= 12}
    return frozenset(found)


@lru_cache(maxsize=4096)
def code(text: str) -> Hashable:
    """What a text quotes or writes as code: spans in backticks, identifiers, calls, operators, flags, file endings."""
    found = []
    for match in _CODE.finditer(text):
        piece = match["block"] or match["span"] or match["bare"]
        found.append(" ".join(piece.split()).removesuffix("()"))
    return tuple(sorted(found))


def _negated(text: str) -> tuple[bool, frozenset[str]]:
    """Whether a text has a negation, and the stems of the words between a negation and the end of its clause."""
    scope: set[str] = set()
    negates = within = False
    last = 0
    for token in tokens(text):
        gap = text[last : token.start]
        if token.word in ("and", "but", "or") or any(mark in gap for mark in ",;.?!"):
            within = False
        if token.word in NEGATIONS:
            negates = within = True
        elif within and token.word not in FUNCTION_WORDS:
            scope.add(stem(token.word))
        last = token.start + len(token.written)
    return negates, frozenset(scope)


def asks_differ(a: str, b: str) -> bool:
    """One text asks for a person, a time, a place or a reason, and the other for another of them."""
    one, other = ({ASKS[token.word] for token in tokens(text) if token.word in ASKS} for text in (a, b))
    return bool(one and other and not one & other)


def negations_differ(a: str, b: str) -> bool:
    """One text negates and the other does not, or they negate different ones of the words that they share."""
    (a_negates, a_scope), (b_negates, b_scope) = _negated(a), _negated(b)
    shared = set(content(a)) & set(content(b))
    return a_negates != b_negates or (a_scope & shared) != (b_scope & shared)


def names_differ(a: str, b: str) -> bool:
    """A proper noun of one text (capitalised, and no sentence's ordinary beginning) is missing in the other."""

    def missing(one: str, other: str) -> bool:
        known = {token.word.removesuffix("s") for token in tokens(_FENCED.sub(" ", other))}
        for token in tokens(_FENCED.sub(" ", one)):
            ordinary = token.word in OPENERS or token.word in MONTHS or token.word in DAY_WORDS or token.word in UNITS
            name = token.written[0].isupper() and not ordinary and not token.opens
            if name and token.word.removesuffix("s") not in known:
                return True
        return False

    return missing(a, b) or missing(b, a)


def opposites_differ(a: str, b: str) -> bool:
    """One text has a word ("increase", "cheapest") and the other a word of the opposite sense and not the first."""

    def senses(text: str) -> tuple[set[str], set[str]]:
        words = [token.word for token in tokens(text)]
        none: frozenset[str] = frozenset()
        plain = {sense for word in words for sense in OPPOSITES.get(word, none)}
        return plain, {sense for word in words for sense in REVERSED.get(word, none)}

    (a_plain, a_reversed), (b_plain, b_reversed) = senses(a), senses(b)
    one_way = (a_plain & b_reversed) - b_plain - a_reversed
    other_way = (b_plain & a_reversed) - a_plain - b_reversed
    return bool(one_way | other_way)


def _same(signature: Callable[[str], Hashable]) -> Callable[[str, str], bool]:
    return lambda a, b: signature(a) != signature(b)


GUARDS: dict[str, Callable[[str, str], bool]] = {
    "numbers": _same(numbers),
    "units": units_differ,
    "dates": _same(dates),
    "code": _same(code),
    "asks": asks_differ,
    "negations": negations_differ,
    "names": names_differ,
    "opposites": opposites_differ,
    "directions": directions_differ,
}
"""Name -> whether two texts differ in this respect; the order is that of the checks."""


def difference(a: str, b: str) -> str | None:
    """The name of the first guard that sees `a` and `b` ask for different things; None if none does."""
    return next((name for name, differ in GUARDS.items() if differ(a, b)), None)
