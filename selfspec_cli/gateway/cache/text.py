"""A question as tokens that guards can compare: lower case, contractions opened, plurals and inflections cut off."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from selfspec_cli.gateway.cache.words import FUNCTION_WORDS, PHRASES, SAID_OF_ONESELF

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
