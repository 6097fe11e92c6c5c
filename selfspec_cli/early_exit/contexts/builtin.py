"""The kinds of contexts of this package."""

from types import MappingProxyType

from selfspec_cli.early_exit.contexts.base import DraftContext


class Full(DraftContext):
    name = "full"
    help = "all of the context"

    def label(self, *values: int) -> str:
        return ""


class Auto(DraftContext):
    """`contexts.SHORTENED` while reading the rest takes long by measured times (rule.StepTimes.leaves_out), else all of
    the context. All of it, too, for a model some of whose layers attend to a part, for an engine of more than 32,768
    tokens, and where nothing is measured."""

    name = "auto"
    help = (
        "blocks:1024 while reading the rest of the context takes a large share of a draft step, by measured times, in "
        "engines of up to 32,768 tokens; else all of it"
    )

    def label(self, *values: int) -> str:
        return "auto context"


class Window(DraftContext):
    """The first block of the KV cache, and those of at least TOKENS last tokens (StreamingLLM, arXiv:2309.17453)."""

    name = "window"
    help = "the first block of the context and at least that number of its last tokens: also draft_window=TOKENS"
    numbers = MappingProxyType({"TOKENS": 16})
    key = "draft_window"
    kernels = "selfspec_cli.vllm_plugin.contexts.window"

    def attended(self, tokens: float, *values: int) -> float:
        """The window's; the one or two blocks around it are not counted."""
        return values[0]

    def label(self, *values: int) -> str:
        return f"last {values[0]} tokens"


class Blocks(DraftContext):
    """The first block, the last TOKENS / 4 tokens, and of the blocks between them those with the greatest attention.
    One selection for all layers, made before each round by the attention of the newest token that has keys and values,
    in one layer three quarters of the way through those that draft (results/LOG.md says what that keeps)."""

    name = "blocks"
    help = (
        "TOKENS of the context: a quarter of them the last ones, the others in the blocks with the greatest attention, "
        "which are chosen anew before each round; and the first block"
    )
    numbers = MappingProxyType({"TOKENS": 64})
    kernels = "selfspec_cli.vllm_plugin.contexts.blocks"

    def attended(self, tokens: float, *values: int) -> float:
        """The blocks'; the one or two around them, and the keys by which they are chosen, are not counted."""
        return values[0]

    def label(self, *values: int) -> str:
        return f"{values[0]} tokens of greatest attention"


FULL, AUTO, WINDOW, BLOCKS = Full(), Auto(), Window(), Blocks()
