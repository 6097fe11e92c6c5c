"""The first block, the last tokens, and of the blocks between them those with the greatest attention.

One selection for all layers, made before each round by the attention of the newest token that has keys and values, in
one layer three quarters of the way through those that draft (results/LOG.md says what that keeps).
"""

from types import MappingProxyType

from selfspec_cli.early_exit.contexts.base import DraftContext


class Blocks(DraftContext):
    """TOKENS together: a quarter of them the last ones, the others in chosen blocks."""

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


CONTEXT = Blocks()
