"""Kinds of context that a draft may attend to, by the name that users write in `draft_context=`. Importable without
torch. The verify pass attends to everything whatever a draft does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selfspec_cli.early_exit.contexts.base import DraftContext
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.registry import Registry

CONTEXTS = Registry(
    "draft_context", DraftContext, "selfspec_cli.early_exit.contexts", "selfspec.contexts", first="full"
)
FULL, AUTO = "full", "auto"
SETTING = "draft_context"


@dataclass(frozen=True)
class Context:
    """A kind of context with its numbers, as a user writes it: full, or window:512."""

    name: str = FULL
    values: tuple[int, ...] = ()

    @property
    def kind(self) -> DraftContext:
        return CONTEXTS[self.name]

    @property
    def is_full(self) -> bool:
        return self.name == FULL

    def __str__(self) -> str:
        return ":".join(map(str, (self.name, *self.values)))

    @property
    def is_auto(self) -> bool:
        """Whether measured times say if drafts leave out a part."""
        return self.name == AUTO

    @property
    def shortened(self) -> Context:
        """What drafts attend to where they leave out a part."""
        return SHORTENED if self.is_auto else self

    def settings(self) -> dict[str, Any]:
        """Its column, or setting, by name; none for the full context."""
        if self.is_full:
            return {}
        return {self.kind.key: self.values[0]} if self.kind.key else {SETTING: str(self)}

    def attended(self, tokens: float) -> float:
        """Tokens of a context of `tokens` whose keys and values a draft step reads."""
        return min(tokens, self.kind.attended(tokens, *self.values))

    @classmethod
    def parse(cls, text: str, key: str = SETTING) -> Context:
        """The context of a text such as window:512. Raises SettingsError for any other form or too small a number."""
        name, *given = text.split(":")
        kind = CONTEXTS[name]
        if len(given) != len(kind.numbers) or not all(number.isdecimal() for number in given):
            raise SettingsError(f"{key} = {text!r}: write {kind.form()}")
        context = cls(name, tuple(map(int, given)))
        for (what, least), value in zip(kind.numbers.items(), context.values, strict=True):
            if value < least:
                raise SettingsError(
                    f"{key} = {context}: {what.lower()} {value} is out of range; allowed: {least} or more"
                )
        return context


SHORTENED = Context("blocks", (1024,))
"""What `auto` is at long contexts. Over these blocks the coder had 1.64x and 1.80x of plain decoding's speed at 32
requests of 16,384 tokens and 8 of 32,512 on an H200, over the whole context 1.01x and 1.03x (results/LOG.md)."""


def own_keys() -> dict[str, str]:
    """Other names of `draft_context`, such as draft_window, and the kind of context that each names."""
    return {kind.key: kind.name for kind in CONTEXTS.values() if kind.key}


def as_setting(key: str, value: Any) -> str:
    """The setting `draft_context` for `value` of `key`, which is that or another name of it. Raises SettingsError."""
    kind = own_keys().get(key)
    if kind is None:
        if not isinstance(value, str):
            raise SettingsError(f"{key} = {value!r} must be text, such as window:1024")
        return str(Context.parse(value, key))
    (least,) = CONTEXTS[kind].numbers.values()
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingsError(f"{key} = {value!r} must be an integer, not {type(value).__name__}")
    if value < least:
        raise SettingsError(f"{key} = {value} is out of range; allowed: {least} or more")
    return f"{kind}:{value}"


def context_of(settings: Any) -> Context:
    """The context of draft settings, or of a row, which has a column for a kind's own key.
    Raises SettingsError for two contexts, or for none that there is."""
    by_key = [
        Context(kind.name, (value,))
        for kind in CONTEXTS.values()
        if kind.key and (value := getattr(settings, kind.key, None)) is not None
    ]
    named = Context.parse(getattr(settings, SETTING) or FULL)
    given = [*by_key, *([] if named.is_full or named in by_key else [named])]
    if len(given) > 1:
        conflicting = [f"{name} = {value}" for context in given for name, value in context.settings().items()]
        raise SettingsError(f"{' and '.join(conflicting)} mean the same setting; give one")
    return given[0] if given else named
