"""No gate: every draft has k tokens."""

from selfspec_cli.early_exit.gates.base import Gate

GATE = Gate(
    name="none",
    meaning="a constant",
    help="Always draft k tokens.",
    colour="#a7b1bc",
)
