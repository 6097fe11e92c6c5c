"""The model's own final norm and lm_head, read at the exit layer (nostalgebraist's logit lens, 2020)."""

from selfspec_cli.early_exit.heads.base import HeadKind


class Lens(HeadKind):
    """lm_head(x): nothing to fit, nothing to store."""

    name = "lens"
    help = "the model's own final norm and lm_head, read at the exit layer: no fit, no extra weights"
    examples = ("lens",)


HEAD = Lens()
