"""The table of supported releases of vLLM: one row, and one module that says what differs, for each.

Beside a release that is not listed here the plugin does nothing (see `selfspec_cli.vllm_plugin.register`) until early
exit is asked for. Then the release's source is compared with all that the plugin uses (seams.py, admission.py). One
that has all of it is treated like the listed one that it agrees with, after a warning; another one is refused with the
names that moved.
"""

from selfspec_cli.vllm_plugin.releases import v0_32_0, v0_33_0
from selfspec_cli.vllm_plugin.releases.release import Release as Release

SUPPORTED: tuple[Release, ...] = (
    v0_32_0.RELEASE,
    v0_33_0.RELEASE,
)
"""Oldest first."""
