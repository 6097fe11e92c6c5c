"""Decode graphs of vLLM's V2 model runner for every width of a verify pass that may be planned (widths.py).

vLLM captures them for steps in which each request has k drafts. A step without drafts would run without a full graph
then, slower than vLLM without early exit; with the graphs added here it replays what vLLM's plain decode step replays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config.compilation import CUDAGraphMode

from selfspec_cli.vllm_plugin.spec_config import settings_of
from selfspec_cli.vllm_plugin.v2.widths import widths

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager


def with_every_width(original: type[ModelCudaGraphManager]) -> type[ModelCudaGraphManager]:
    """Replacement for the V2 runner's `ModelCudaGraphManager`."""

    class EveryWidthManager(original):
        decode_query_len: int

        def _init_candidates(self) -> None:
            """As the base class for each width in turn, and then together: full graphs before all others."""
            settings = settings_of(self.vllm_config)
            if settings is None or self.varlen_decode or self.decode_query_len != settings.k + 1:
                return super()._init_candidates()  # graphs for any mix of widths are captured as they are
            widest: int = self.decode_query_len
            captured: dict[CUDAGraphMode, dict[BatchExecutionDescriptor, None]] = {}
            for width in widths(settings):
                self.decode_query_len = width + 1
                super()._init_candidates()
                for mode, descriptors in self._capture_descs.items():
                    captured.setdefault(mode, {}).update(dict.fromkeys(descriptors))
            self.decode_query_len = widest
            for mode, found in captured.items():
                self._capture_descs[mode] = sorted(found, key=lambda one: one.num_tokens, reverse=True)
            for key, candidates in self._candidates.items():
                self._candidates[key] = sorted(dict.fromkeys(candidates), key=_rank)

    return EveryWidthManager


def _rank(descriptor: BatchExecutionDescriptor) -> tuple[bool, int]:
    return descriptor.cg_mode != CUDAGraphMode.FULL, descriptor.num_tokens
