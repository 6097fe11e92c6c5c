"""Kinds of weights that a draft may run on, as users write them in `draft_weights=`. Importable without torch."""

from selfspec_cli.early_exit.draft_weights.base import DraftWeights, WeightFacts
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.registry import Registry

DRAFT_WEIGHTS = Registry(
    "draft_weights", DraftWeights, "selfspec_cli.early_exit.draft_weights", "selfspec.draft_weights", first="shared"
)


def require_draft_weights(name: str, facts: WeightFacts) -> None:
    """Raise SettingsError where drafts cannot run on weights of kind `name` with such a target on such a machine."""
    reason = DRAFT_WEIGHTS[name].reason_against(facts)
    if reason is not None:
        drafting = [kind for kind in DRAFT_WEIGHTS.values() if kind.drafts]
        possible = [kind.name for kind in drafting if kind.reason_against(facts) is None]
        raise SettingsError(
            f"draft_weights {name!r} is not supported here: {reason}; allowed: {', '.join(sorted(possible))}"
        )
