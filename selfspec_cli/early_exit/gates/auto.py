"""No threshold: measured times and acceptance decide how much is drafted, before each step and inside it (rule.py)."""

from selfspec_cli.early_exit.gates.base import Gate

GATE = Gate(
    name="auto",
    meaning="a constant",
    help="Draft up to k tokens where measured times and acceptance say that it pays, and stop where it no longer does.",
    colour="#b4532a",
)
