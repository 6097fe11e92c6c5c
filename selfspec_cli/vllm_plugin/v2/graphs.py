"""Decode graphs of vLLM's V2 model runner for every width of a verify pass that may be planned (widths.py).

vLLM captures them for steps in which each request has k drafts. A step without drafts would run without a full graph
then, slower than vLLM without early exit; with the graphs added here it replays what vLLM's plain decode step replays.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from vllm.config.compilation import CUDAGraphMode

from selfspec_cli.vllm_plugin.spec_config import settings_of
from selfspec_cli.vllm_plugin.v2.sizes import decode_sizes, reach, widths

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

    from selfspec_cli.early_exit.resolved import ResolvedSettings


def with_every_width(original: type[ModelCudaGraphManager]) -> type[ModelCudaGraphManager]:
    """Replacement for the V2 runner's `ModelCudaGraphManager`."""

    class EveryWidthManager(original):
        decode_query_len: int
        compilation_config: Any

        def _init_candidates(self) -> None:
            """As the base class for each width in turn, and then together: full graphs before all others."""
            settings = settings_of(self.vllm_config)
            if settings is None or self.varlen_decode or self.decode_query_len != settings.k + 1:
                return super()._init_candidates()  # graphs for any mix of widths are captured as they are
            widest, sizes = self.decode_query_len, self.compilation_config
            captured: dict[CUDAGraphMode, dict[BatchExecutionDescriptor, None]] = {}
            for width in (*widths(settings), None):  # decode steps of each width, and then all other steps
                if width is not None:
                    self.decode_query_len = width + 1
                    self.compilation_config = _sizes_for(width, settings, sizes, self.max_num_reqs)
                super()._init_candidates()
                for mode, descriptors in self._capture_descs.items():
                    chosen = [one for one in descriptors if (one.uniform_token_count is None) == (width is None)]
                    captured.setdefault(mode, {}).update(dict.fromkeys(chosen))
                self.decode_query_len, self.compilation_config = widest, sizes
            for mode, found in captured.items():
                self._capture_descs[mode] = sorted(found, key=lambda one: one.num_tokens, reverse=True)
            for key, candidates in self._candidates.items():
                known = [one for one in dict.fromkeys(candidates) if one in captured[one.cg_mode]]
                self._candidates[key] = sorted(known, key=_rank)

    return EveryWidthManager


def _rank(descriptor: BatchExecutionDescriptor) -> tuple[bool, int]:
    return descriptor.cg_mode != CUDAGraphMode.FULL, descriptor.num_tokens


def _sizes_for(width: int, settings: ResolvedSettings, sizes: Any, limit: int) -> Any:
    """vLLM's compilation config with the sizes of a width's decode steps, where its limit has room for every width."""
    most = sizes.max_cudagraph_capture_size or 0
    if reach(settings, limit) > most:
        return sizes  # as the user chose them
    found = copy.copy(sizes)
    found.cudagraph_capture_sizes = [size for size in decode_sizes(settings, width, limit) if size <= most]
    return found
