"""What one release of vLLM has in another place, or calls in another way, than the oldest one that is supported."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Release:
    """One supported release of vLLM, and its differences.

    Names are "module:attribute.path", as the oldest supported release has them; patches.py and vllm_names.py use those.

    release: its version. distributions: the packages that exist of it. tried: what was done with early exit on it, and
    unchecked what was not (None where the tests and the published figures cover it), for `selfspec doctor`.
    speculative_keys: keys of a speculative_config that this release has and the oldest one has not, among those that
    mean something for a draft that is the target itself.
    moved: name -> where this release has it.
    adapters: name -> "module:function" of ours that takes this release's function and returns one with the oldest
    release's parameters: what vllm_names.py hands out.
    replacements: patched name -> "module:function" of ours that takes the place of `Patch.replacement`, because this
    release calls the name with other parameters.
    signatures: name -> its parameters in this release, where they differ (tests/contract compares them).
    """

    release: str
    distributions: tuple[str, ...]
    tried: str
    unchecked: str | None = None
    speculative_keys: tuple[str, ...] = ()
    moved: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    replacements: Mapping[str, str] = field(default_factory=dict)
    signatures: Mapping[str, str] = field(default_factory=dict)

    def place_of(self, name: str) -> str:
        """Where this release has a name, itself or what it is an attribute of."""
        module, _, path = name.partition(":")
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            owner = f"{module}:{'.'.join(parts[:length])}"
            if owner in self.moved:
                return ".".join([self.moved[owner], *parts[length:]])
        return name
