"""All of the context."""

from __future__ import annotations

from selfspec_cli.early_exit.contexts.base import DraftContext


class Full(DraftContext):
    """A draft attends to what a plain step attends to."""

    name = "full"
    help = "all of the context"

    def label(self, *values: int) -> str:
        """Nothing: it is what nobody has to say."""
        return ""


CONTEXT = Full()
