"""Weights that need no copies: the target's own, and none at all."""

from selfspec_cli.early_exit.draft_weights.base import DraftWeights


class Shared(DraftWeights):
    """Drafts run on the weights that verification runs on."""

    name = "shared"
    help = "the target's own weights"
    copies = False


class Nothing(DraftWeights):
    """No layer drafts, so drafts are what the text repeats (free_drafts)."""

    name = "none"
    help = "no weights: drafts come from prompt lookup alone (free_drafts)"
    bits = 0.0
    copies = drafts = False


SHARED, NONE = Shared(), Nothing()
