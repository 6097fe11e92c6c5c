"""A question as tokens that guards can compare: lower case, contractions opened, plurals and inflections cut off."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from selfspec_cli.gateway.cache.words import (
    DAY_WORDS,
    FUNCTION_WORDS,
    MONTHS,
    PHRASES,
    SAID_OF_ONESELF,
    SMALL_NUMBERS,
    UNITS,
)

_WORD = re.compile(r"\d+(?:[.,:]\d+)*|[^\W\d_]+(?:'[^\W\d_]+)?|°[CFcf]|[%$€£¥]")
_SENTENCE_END = re.compile(r"[.!?:;\n\"]\s*$")
_CONTRACTED = re.compile(r"n't\b")
_PHRASE = re.compile("|".join(rf"\b{words}\b" for words in PHRASES), re.IGNORECASE)
_ONESELF = re.compile(SAID_OF_ONESELF, re.IGNORECASE)


@dataclass(frozen=True)
class Token:
    """One word, number or unit sign of a text.

    Attributes:
        word: in lower case.
        written: as the text has it.
        opens: whether it begins a sentence or a quotation.
        start: where it begins in the text, in characters.
    """

    word: str
    written: str
    opens: bool
    start: int


@lru_cache(maxsize=4096)
def tokens(text: str) -> tuple[Token, ...]:
    """The tokens of `text` in order: contractions opened ("does not"), some phrases as one word ("at most" is "under"),
    a number and the unit glued to it apart, and without what the asker says of himself ("I don't understand").
    """
    text = text.replace("’", "'").replace("can't", "can not").replace("won't", "will not")
    text = _ONESELF.sub(" ", _CONTRACTED.sub(" not", text))
    text = _PHRASE.sub(lambda match: PHRASES[match.group().lower()], text)
    found = []
    for match in _WORD.finditer(text):
        before = text[: match.start()]
        written = match.group().removesuffix("'s")
        found.append(Token(written.lower(), written, not before or bool(_SENTENCE_END.search(before)), match.start()))
    return tuple(found)


def stem(word: str) -> str:
    """A word without the endings of plurals, third persons, participles and adverbs: crude, and the same for both
    texts.
    """
    for ending, instead in (("ies", "y"), ("sses", "ss"), ("ing", ""), ("ed", ""), ("es", ""), ("s", ""), ("ly", "")):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            word = word[: len(word) - len(ending)] + instead
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "lse":
        word = word[:-1]  # running -> runn -> run
    return word.removesuffix("e") if len(word) > 3 else word


@lru_cache(maxsize=4096)
def content(text: str) -> tuple[str, ...]:
    """The stems of the words of `text` that say something, in order: neither articles nor auxiliaries nor pronouns."""
    return tuple(stem(token.word) for token in tokens(text) if token.word not in FUNCTION_WORDS)


@lru_cache(maxsize=4096)
def places(text: str) -> dict[str, tuple[int, str]]:
    """Word -> (its first place, its kind), of the words that say something; units and dates by one name each.

    Kinds are "unit", "date", "number" (with its unit, if one follows), "name" (capitalised within a sentence) and
    "other".
    """
    found: dict[str, tuple[int, str]] = {}
    every = tokens(text)
    for place, token in enumerate(every):
        if token.word in FUNCTION_WORDS:
            continue
        word, kind = stem(token.word), "other"
        for table, name in ((UNITS, "unit"), (MONTHS, "date"), (DAY_WORDS, "date")):
            if token.word in table:
                word, kind = table[token.word], name
        if token.word[0].isdigit() or token.word in SMALL_NUMBERS:
            after = every[place + 1].word if place + 1 < len(every) else ""
            kind = f"number {UNITS.get(after, '')}".strip()
        elif kind == "other" and token.written[0].isupper() and not token.opens:
            kind = "name"
        found.setdefault(word, (place, kind))
    return found
