"""The first block and the last tokens of the context (StreamingLLM's attention sink and window, arXiv:2309.17453)."""

from types import MappingProxyType

from selfspec_cli.early_exit.contexts.base import DraftContext


class Window(DraftContext):
    """The first block of the KV cache, and the blocks that hold at least so many of the last tokens."""

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


CONTEXT = Window()
