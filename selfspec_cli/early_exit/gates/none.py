"""No gate: every draft has k tokens."""

from selfspec_cli.early_exit.gates.base import Gate

GATE = Gate(
    name="none",
    key=None,
    direction="at_least",
    default=None,
    low=0.0,
    high=0.0,
    meaning="a constant",
    help="Always draft k tokens.",
    colour="#a7b1bc",
)
