"""What drafts: a view of the model. Keys, labels, columns, tuned files, validation and bytes are taken from it alone.

A view is layers (the first E, without those that are skipped), the weights that they run on, the context that they
attend to, and the head with its draft vocabulary. How much is drafted, and when, is no part of it. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec_cli.early_exit.contexts import SETTING, Context, context_of, own_keys
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.head_spec import HeadSpec
from selfspec_cli.early_exit.layers import as_text, check_skipped, skipped_layers

if TYPE_CHECKING:
    from selfspec_cli.early_exit.settings import DraftSettings

SHARED, FULL_VOCABULARY = "shared", "full"


@dataclass(frozen=True)
class DraftView:
    """Which part of the model drafts.

    layer: E; None where the model's size is still to say. skipped: layers below E that do not draft. weights: of
    DRAFT_WEIGHTS. weights_path: the file that the copies are read from; None rounds them at the start. context: what a
    draft step attends to. head: the fields of the exit head that are not at their default, by name. vocab: full, a
    number of tokens, or a file of token ids.
    """

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

        Raises SettingsError for layers or a context that are written in no way that there is.
        """
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

    # ---- which layers -----------------------------------------------------------------------------------------------

    @property
    def is_cheaper(self) -> bool:
        """Whether a draft through all layers costs less than a plain step, in batches bound by memory traffic: it runs
        on copies of the weights, or skips layers."""
        return DRAFT_WEIGHTS[self.weights].copies or bool(self.skipped)

    def deepest_layer(self, num_layers: int) -> int:
        """The last E that can draft: all layers of a view that is cheaper than the model anyway, else all but one."""
        return num_layers if self.is_cheaper else num_layers - 1

    def default_layer(self, num_layers: int) -> int:
        """E where nobody says: all layers of a cheaper view, half of them otherwise."""
        return num_layers if self.is_cheaper else num_layers // 2

    def layer_of(self, num_layers: int) -> int:
        """E in a model of so many layers."""
        return self.layer or self.default_layer(num_layers)

    def check(self) -> None:
        """Raises SettingsError for parts that do not go together."""
        if self.weights_path is not None and not DRAFT_WEIGHTS[self.weights].copies:
            raise SettingsError(
                f"draft_weights_path = {self.weights_path!r} holds copies, and draft_weights is "
                f"{self.weights!r}; name the kind of copies that it holds"
            )
        if self.layer is not None:
            check_skipped(self.skipped, self.layer)
        self.context.checked()

    # ---- in settings, keys and rows ---------------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """The settings of weights, layers and context that are not at their default, by name."""
        settings: dict[str, Any] = {} if self.weights == SHARED else {"draft_weights": self.weights}
        settings |= {"draft_weights_path": self.weights_path} if self.weights_path else {}
        settings |= {"skip_layers": as_text(self.skipped)} if self.skipped else {}  # 10,11 and 10-11 are one setting
        return settings | self.context.settings()

    def facts(self) -> dict[str, Any]:
        """What of it decides the result of a run, in plain values, apart from E."""
        return {"head": dict(self.head), "vocab": self.vocab, **self.options()}

    def overrides(self) -> list[str]:
        """What a user would type for it, such as layer=8 or draft_window=512."""
        head = dict(self.head)
        path = head.pop("path", None)
        words = [f"layer={self.layer}", f"head={HeadSpec(**head).name}", *([f"head.path={path}"] if path else [])]
        return [*words, f"vocab={self.vocab}", *(f"{name}={value}" for name, value in self.options().items())]

    def columns(self) -> dict[str, Any]:
        """Columns of a row: of weights, layers and context. E, head and vocabulary have columns for method "skip" too
        (`record.tables.identity`)."""
        return {
            "draft_weights": self.weights,
            "skip_layers": as_text(self.skipped),
            "draft_weights_file": Path(self.weights_path).name if self.weights_path else None,
            **dict.fromkeys(context_columns()),
            **self.context.settings(),
        }


def own_settings() -> tuple[str, ...]:
    """The settings of weights, layers and context, E apart."""
    return ("draft_weights", "draft_weights_path", "skip_layers", SETTING)


def own_names() -> tuple[str, ...]:
    """All names that `own_settings` may be written by: what `DraftView.options` may name."""
    return (*own_settings(), *own_keys())


def context_columns() -> tuple[str, ...]:
    """Columns of a row that say what of the context drafts attend to; all are empty for the whole of it."""
    return (*own_keys(), SETTING)


def all_columns() -> tuple[str, ...]:
    """Every column of a row that says what drafts."""
    return ("E", "head", "vocab", "draft_weights", "draft_weights_file", "skip_layers", *context_columns())


def label(row: Any) -> tuple[str, str, str]:
    """(layers, head and weights, context) of a row in a few words each; a part that is the default is empty.

    row: has the columns E, head, vocab and those of `DraftView.columns`.
    """
    copies = row.draft_weights not in (None, SHARED)
    cheaper = copies or row.skip_layers  # drafts with all layers, if nobody says
    layers = f"E={row.E}" if row.E is not None else "E=all" if cheaper else "E=half"
    layers += f" without {row.skip_layers}" if row.skip_layers else ""
    head = f"{row.head}" + (f" V'={row.vocab}" if row.vocab not in (None, FULL_VOCABULARY) else "")
    head += f" · {row.draft_weights} draft" if copies else ""
    head += f" of {row.draft_weights_file}" if row.draft_weights_file else ""
    return layers, head, context_of(row).label()


def canonical(settings: Any) -> None:
    """Write the context of settings in the one way in which it is kept."""
    settings.draft_context = str(context_of(settings))
