"""What a kind of context for drafts is. Free of torch."""

from collections.abc import Mapping
from types import MappingProxyType


class DraftContext:
    """Which of a request's earlier tokens a draft step attends to. It changes which drafts are proposed and what they
    cost, never which tokens are generated.

    name: what users write in `draft_context=`. help: one line for `--help`. numbers: what is written after the name,
    each with its least value, such as {"TOKENS": 16} for NAME:TOKENS. key: another name of the setting, and a column of
    rows, that holds the only number of this kind, such as `draft_window`; empty for no other name. kernels: the
    plugin's module that leaves blocks out of block tables (`vllm_plugin.contexts.base`); None for the full context."""

    name: str
    help: str
    numbers: Mapping[str, int] = MappingProxyType({})
    key: str = ""
    kernels: str | None = None

    def form(self) -> str:
        return ":".join((self.name, *self.numbers))

    def attended(self, tokens: float, *values: int) -> float:
        """Tokens of a context of `tokens` whose keys and values a draft step reads, for these numbers."""
        return tokens

    def label(self, *values: int) -> str:
        """In a few words, for rows and figures; empty for the full context."""
        return ":".join(map(str, (self.name, *values)))
