"""No weights: nothing of the model drafts, and drafts are what the text repeats (free_drafts)."""

from selfspec_cli.early_exit.draft_weights.base import DraftWeights


class Nothing(DraftWeights):
    """No layer drafts, so a draft step does not exist and drafts come from prompt lookup alone."""

    name = "none"
    help = "no weights: drafts come from prompt lookup alone (free_drafts)"
    bits = 0.0
    copies = False
    drafts = False


WEIGHTS = Nothing()
