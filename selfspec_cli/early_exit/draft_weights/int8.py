"""8-bit integers."""

from selfspec_cli.early_exit.draft_weights.integers import Integers

WEIGHTS = Integers(8)
