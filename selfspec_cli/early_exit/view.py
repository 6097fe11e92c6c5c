"""What drafts: a view of the model, from which keys, labels, columns, tuned files, validation and bytes are taken:
layers (the first E, without those that are skipped), the weights that they run on, the context that they attend to, and
the head with its draft vocabulary. How much is drafted, and when, is no part of it. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec_cli.early_exit.contexts import SETTING, Context, context_of, own_keys
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.heads import HeadSpec

if TYPE_CHECKING:
    from selfspec_cli.early_exit.settings import DraftSettings

SHARED, FULL_VOCABULARY = "shared", "full"
OWN_SETTINGS = ("draft_weights", "draft_weights_path", "skip_layers", SETTING)
"""The settings of weights, layers and context, E apart."""
LAYERS_FORM = "layers counted from 0, and ranges of them, such as 10-15,20"


@dataclass(frozen=True)
class DraftView:
    """Which part of the model drafts. layer: E; None where the model's size is still to say. skipped: layers below E
    that do not draft. weights: of DRAFT_WEIGHTS; weights_path: the file that copies are read from, None rounds them at
    the start. context: what a draft step attends to. head: its fields that are not at their default, by name. vocab:
    full, a number of tokens, or a file."""

    layer: int | None = None
    skipped: tuple[int, ...] = ()
    weights: str = SHARED
    weights_path: str | None = None
    context: Context = field(default_factory=Context)
    head: tuple[tuple[str, Any], ...] = ()
    vocab: str = FULL_VOCABULARY

    @classmethod
    def of(cls, settings: DraftSettings) -> DraftView:
        """The view that draft settings name. Method "skip" decodes by layers, head and vocabulary alone.
        Raises SettingsError for layers or a context that are written in no way that there is."""
        head = settings.head
        default = type(head)()
        changed = tuple((name, value) for name, value in vars(head).items() if value != getattr(default, name))
        bare = cls(settings.layer, head=changed, vocab=settings.vocab)
        if settings.method == "skip":
            return bare
        return replace(
            bare,
            skipped=skipped_layers(settings.skip_layers),
            weights=settings.draft_weights,
            weights_path=settings.draft_weights_path,
            context=context_of(settings),
        )

    @property
    def is_cheaper(self) -> bool:
        """Whether a draft through all layers reads less than a plain step: it runs on copies, or skips layers."""
        return DRAFT_WEIGHTS[self.weights].copies or bool(self.skipped)

    def deepest_layer(self, num_layers: int) -> int:
        """The last E that can draft: all layers of a cheaper view, else all but one."""
        return num_layers if self.is_cheaper else num_layers - 1

    def default_layer(self, num_layers: int) -> int:
        """E where nobody says: all layers of a cheaper view, half of them otherwise."""
        return num_layers if self.is_cheaper else num_layers // 2

    def check(self) -> None:
        """Raise SettingsError for parts that do not go together."""
        if self.weights_path is not None and not DRAFT_WEIGHTS[self.weights].copies:
            raise SettingsError(
                f"draft_weights_path = {self.weights_path!r} holds copies, and draft_weights is "
                f"{self.weights!r}; name the kind of copies that it holds"
            )
        if self.layer is not None:
            check_skipped(self.skipped, self.layer)

    def options(self) -> dict[str, Any]:
        """The settings of weights, layers and context that are not at their default, by name."""
        settings: dict[str, Any] = {} if self.weights == SHARED else {"draft_weights": self.weights}
        settings |= {"draft_weights_path": self.weights_path} if self.weights_path else {}
        settings |= {"skip_layers": as_text(self.skipped)} if self.skipped else {}  # 10,11 and 10-11 are one setting
        return settings | self.context.settings()

    def facts(self) -> dict[str, Any]:
        """What decides the result of a run, in plain values, apart from E."""
        return {"head": dict(self.head), "vocab": self.vocab, **self.options()}

    def overrides(self) -> list[str]:
        """What a user would type for it, such as layer=8 or draft_window=512."""
        head = dict(self.head)
        path = head.pop("path", None)
        words = [f"layer={self.layer}", f"head={HeadSpec(**head).name}", *([f"head.path={path}"] if path else [])]
        return [*words, f"vocab={self.vocab}", *(f"{name}={value}" for name, value in self.options().items())]

    def columns(self) -> dict[str, Any]:
        """Columns of a row for weights, layers and context; `record.tables.identity` has the others."""
        return {
            "draft_weights": self.weights,
            "skip_layers": as_text(self.skipped),
            "draft_weights_file": Path(self.weights_path).name if self.weights_path else None,
            **dict.fromkeys((*own_keys(), SETTING)),
            **self.context.settings(),
        }


def skipped_layers(value: object) -> tuple[int, ...]:
    """Layers to skip, ascending, each once: from text such as "10-15,20" (ends included), or from a list of integers.
    None and "" skip none. Raises SettingsError, naming the part that is neither."""
    if value is None:
        return ()
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")] if value.strip() else []
        return tuple(sorted({layer for part in parts for layer in _range(part, value)}))
    if not isinstance(value, Iterable) or isinstance(value, (bytes, dict)):
        raise SettingsError(f"skip_layers = {value!r} must be {LAYERS_FORM}")
    layers = list(value)
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, Integral) or layer < 0:
            raise SettingsError(f"skip_layers = {layers!r}: {layer!r} is no layer; allowed: {LAYERS_FORM}")
    return tuple(sorted({int(layer) for layer in layers}))


def as_text(layers: Sequence[int]) -> str | None:
    """Layers as `skipped_layers` reads them: (10, 11, 12, 20) -> "10-12,20"; None for no layer at all."""
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(sorted(set(layers))), lambda at: at[1] - at[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or None


def drafting_layers(layer: int, skipped: Sequence[int]) -> tuple[int, ...]:
    """The layers that a draft step runs, in order: the first `layer`, without `skipped`."""
    return tuple(index for index in range(layer) if index not in set(skipped))


def check_skipped(skipped: Sequence[int], layer: int) -> None:
    """Raise SettingsError where `skipped` is not below the exit layer, or leaves no layer to draft with."""
    beyond = [index for index in skipped if index >= layer]
    if beyond:
        raise SettingsError(
            f"skip_layers = {as_text(skipped)}: layer {beyond[0]} does not draft; allowed: 0 to "
            f"{layer - 1}, for layers 0 to {layer - 1} draft"
        )
    if len(skipped) >= layer:
        raise SettingsError(f"skip_layers = {as_text(skipped)} leaves none of {layer} layers to draft with; skip fewer")


def _range(part: str, value: str) -> range:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
    if match is None:
        raise SettingsError(f"skip_layers = {value!r}: {part!r} is no layer and no range; write {LAYERS_FORM}")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise SettingsError(f"skip_layers = {value!r}: the range {part!r} runs backwards; write {last}-{first}")
    return range(first, last + 1)


def own_names() -> tuple[str, ...]:
    """All names by which `OWN_SETTINGS` may be written."""
    return (*OWN_SETTINGS, *own_keys())


def all_columns() -> tuple[str, ...]:
    """Every column of a row that says what drafts."""
    return ("E", "head", "vocab", "draft_weights", "draft_weights_file", "skip_layers", *own_keys(), SETTING)


def label(row: Any) -> tuple[str, str, str]:
    """(layers, head and weights, context) of a row in a few words each; the full context is empty."""
    copies = row.draft_weights not in (None, SHARED)
    cheaper = copies or row.skip_layers  # drafts with all layers, if nobody says
    layers = f"E={row.E}" if row.E is not None else "E=all" if cheaper else "E=half"
    layers += f" without {row.skip_layers}" if row.skip_layers else ""
    head = f"{row.head}" + (f" V'={row.vocab}" if row.vocab not in (None, FULL_VOCABULARY) else "")
    head += f" · {row.draft_weights} draft" if copies else ""
    head += f" of {row.draft_weights_file}" if row.draft_weights_file else ""
    context = context_of(row)
    return layers, head, context.kind.label(*context.values)


def canonical(settings: Any) -> None:
    """Write the context of settings in its one spelling."""
    settings.draft_context = str(context_of(settings))
