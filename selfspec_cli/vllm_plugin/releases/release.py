"""What one release of vLLM has otherwise than the oldest one that is supported."""

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
    signatures: name -> its parameters in this release, where they differ (tests/contract compares them).
    """

    release: str
    distributions: tuple[str, ...]
    tried: str
    unchecked: str | None = None
    speculative_keys: tuple[str, ...] = ()
    signatures: Mapping[str, str] = field(default_factory=dict)
