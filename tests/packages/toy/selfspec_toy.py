"""What a third party writes to add a gate and a head: one object each, named by an entry point in this package's
metadata."""

from selfspec_cli.early_exit.gates import Gate
from selfspec_cli.early_exit.heads import HeadKind

RATIO = Gate(
    name="ratio",
    key="threshold",
    direction="at_most",
    default=0.5,
    low=0.0,
    high=1.0,
    meaning="the second largest probability over the largest",
    help="Go on drafting while the second probability is at most `threshold` times the largest.",
    colour="#7f5539",
    statistic=lambda draft, previous: draft.second / draft.confidence,
    device="second / confidence",
)


class OneDirection(HeadKind):
    """lm_head(x + (x . read) write): the translator of rank 1, as two vectors."""

    name = "one_direction"
    help = "the exit hidden state, moved along one direction, then the lm_head"
    targets = ("final_hidden",)

    def shapes(self, low_rank, bias):
        return {"read": ("hidden",), "write": ("hidden",)}

    def transform(self, x, tensors):
        return x + (x * tensors["read"]).sum(-1, keepdim=True) * tensors["write"]

    def fit(self, equations, ridge, rank):
        down, up, _, report = equations.solve_low_rank(1, ridge)
        return {"read": down[0], "write": up[:, 0]}, report


ONE_DIRECTION = OneDirection()
