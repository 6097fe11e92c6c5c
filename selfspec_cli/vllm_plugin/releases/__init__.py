"""The table of supported releases of vLLM: one row, and one module that says what differs, for each.

A release that is not listed here is unknown, patch releases too: vLLM moves the internals that early exit needs in
those as well. Beside an unknown vLLM the plugin does nothing (see `selfspec_cli.vllm_plugin.register`).
"""

from __future__ import annotations

from selfspec_cli.vllm_plugin.releases import v0_32_0, v0_33_0
from selfspec_cli.vllm_plugin.releases.release import Release as Release

SUPPORTED: tuple[Release, ...] = (
    v0_32_0.RELEASE,
    v0_33_0.RELEASE,
)
"""Oldest first."""
