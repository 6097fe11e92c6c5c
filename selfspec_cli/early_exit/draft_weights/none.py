"""No weights: no layer drafts, so drafts are what the text repeats (free_drafts)."""

from selfspec_cli.early_exit.draft_weights.base import DraftWeights


class Nothing(DraftWeights):
    """There is no draft step."""

    name = "none"
    help = "no weights: drafts come from prompt lookup alone (free_drafts)"
    bits = 0.0
    copies = drafts = False


WEIGHTS = Nothing()
