"""The target's own weights: nothing is copied."""

from selfspec_cli.early_exit.draft_weights.base import DraftWeights


class Shared(DraftWeights):
    """Drafts run on the weights that verification runs on."""

    name = "shared"
    help = "the target's own weights"
    copies = False


WEIGHTS = Shared()
