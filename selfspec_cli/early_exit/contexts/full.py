"""All of the context."""

from selfspec_cli.early_exit.contexts.base import DraftContext


class Full(DraftContext):
    name = "full"
    help = "all of the context"

    def label(self, *values: int) -> str:
        return ""


CONTEXT = Full()
