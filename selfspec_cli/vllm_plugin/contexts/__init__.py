"""What drafts attend to, as block tables with blocks left out; the rules are in early_exit/contexts, a file each."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence, Set

from selfspec_cli.early_exit.contexts import Context
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.contexts.base import ContextKernel
from selfspec_cli.vllm_plugin.refusals import refuse_context

logger = logging.getLogger("vllm.selfspec")
LONGEST = 32768
"""Tokens of context that an engine may have room for where `auto` leaves any out: longer block tables were not run."""


def kernel_for(
    context: Context,
    groups: Sequence[vllm.AttentionGroup],
    names: Set[str],
    vllm_config: vllm.VllmConfig,
    measures: bool,
) -> ContextKernel | None:
    """What leaves blocks out for `context`; None for the whole context, where nothing has to.
    groups: vLLM's attention groups that draft; names: their layers that do. measures: whether it is known what reading
    the context takes, without which `auto` is the whole context, as it is for engines with room for more than LONGEST
    tokens. Raises SettingsError for a model whose layers cannot take it, unless it is `auto`."""
    if not context.is_auto:
        return _kernel(context, groups, names, vllm_config)
    if not measures or vllm_config.model_config.max_model_len > LONGEST:
        return None
    try:
        return _kernel(context.shortened, groups, names, vllm_config)
    except SettingsError as refusal:
        logger.info("early exit: drafts attend to the whole context (%s)", refusal)
        return None


def _kernel(
    context: Context, groups: Sequence[vllm.AttentionGroup], names: Set[str], vllm_config: vllm.VllmConfig
) -> ContextKernel | None:
    refuse_context(context, groups)
    if context.kind.kernels is None:
        return None
    made = importlib.import_module(context.kind.kernels).KERNEL(*context.values)
    assert isinstance(made, ContextKernel)
    made.groups, made.names, made.vllm_config = groups, names, vllm_config
    made.start()
    return made
