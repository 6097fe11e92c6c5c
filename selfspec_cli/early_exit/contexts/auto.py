"""All of the context, or a part of it, by measured times (rule.StepTimes.leaves_out)."""

from selfspec_cli.early_exit.contexts.base import DraftContext


class Auto(DraftContext):
    """`contexts.SHORTENED` while reading the rest takes long, and else all of the context. All of it, too, for a model
    some of whose layers attend to a part, for an engine of more than 32,768 tokens, and where nothing is measured."""

    name = "auto"
    help = (
        "blocks:1024 while reading the rest of the context takes a large share of a draft step, by measured times, in "
        "engines of up to 32,768 tokens; else all of it"
    )

    def label(self, *values: int) -> str:
        return "auto context"


CONTEXT = Auto()
