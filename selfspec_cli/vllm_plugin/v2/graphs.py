"""Graphs of vLLM's V2 model runner that an engine with early exit has beside vLLM's own.

vLLM captures decode steps in which each request has k drafts. With a graph for every width of a verify pass that may be
planned (widths.py), a step without drafts replays what vLLM's plain decode step replays.

Of a mixed prefill and decode batch vLLM replays the parts between two attentions, and the host launches each attention:
in a model of 24 layers some fifty launches, for which the device waits. Early exit ends a request in fewer steps, so
more of them are such batches. Where an attention backend can be captured with any mix of lengths, as FlashAttention 3
can, they get full graphs here, too: one for each size, and one more for short queries."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.early_exit.rule import REQUESTS
from selfspec_cli.vllm_plugin.spec_config import settings_of
from selfspec_cli.vllm_plugin.v2.step_times import Replay
from selfspec_cli.vllm_plugin.v2.widths import decode_sizes, mixed_sizes, reach, widths
from selfspec_cli.vllm_plugin.vllm_names import (
    AttentionCGSupport,
    CUDAGraphMode,
    get_attn_cg_support,
    prepare_inputs_to_capture,
)

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import BatchExecutionDescriptor, ModelCudaGraphManager

SHORT_ROWS = 64
"""Rows (tokens of a query, times the query heads of a KV head) for which FlashAttention 3 has smaller tiles; for 128 it
has large ones. On an H200 a step of 31 queries of 5 tokens and one of 32, with two heads each, takes 41 us a layer with
the former and 55 with the latter, and the queries of some have other bits."""
SHORT_TILES = "FLASH_ATTN"
"""The backend that has them."""


_managers: WeakValueDictionary[int, EveryWidth] = WeakValueDictionary()  # that have captured, by their config's id


def manager_of(config: Any) -> EveryWidth | None:
    """The manager that captured the target's graphs for an engine with this VllmConfig; None if none did."""
    return _managers.get(id(config))


_Manager: Any = object  # of vLLM's manager, which `with_every_width` puts beside the class below


def with_every_width(original: type[ModelCudaGraphManager]) -> type[ModelCudaGraphManager]:
    """Replacement for the V2 runner's `ModelCudaGraphManager`."""
    return type("EveryWidthManager", (EveryWidth, original), {})


class EveryWidth(_Manager):
    """What is added to vLLM's `ModelCudaGraphManager`: graphs for every width, and for mixed steps."""

    decode_query_len: int
    compilation_config: Any
    cudagraph_mode: CUDAGraphMode
    graphs: dict[BatchExecutionDescriptor, Any]
    step: Mapping[str, int] | None = None  # tokens of each request in the step that is next to be dispatched
    any_step = False  # whether there are full graphs for mixed batches; known when they are captured

    def _init_candidates(self) -> None:
        """As the base class for each width in turn, and then together: full graphs before all others."""
        self._planned: dict[CUDAGraphMode, dict[BatchExecutionDescriptor, None]] = {}
        settings = settings_of(self.vllm_config)
        if settings is None or self.decode_query_len != settings.width + 1:
            return super()._init_candidates()
        sizes = self.compilation_config
        for width in widths(settings):
            fitting = _sizes_for(width, settings, sizes, self.max_num_reqs)
            self._plan(_decodes, decode_query_len=width + 1, compilation_config=fitting)
        if self.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE:
            mixed = _with_sizes(sizes, mixed_sizes(sizes.cudagraph_capture_sizes or ()))
            self._plan(lambda one: True, cudagraph_mode=CUDAGraphMode.FULL, compilation_config=mixed)
            self._plan_short()
        self._plan(lambda one: one.uniform_token_count is None)
        self._keep(lambda one: True)

    def _plan(self, wanted: Callable[[BatchExecutionDescriptor], bool], **instead: Any) -> None:
        """Take in what the base class plans with other values of these attributes."""
        kept = {name: getattr(self, name) for name in instead}
        self._set(instead)
        super()._init_candidates()
        self._set(kept)
        for mode, descriptors in self._capture_descs.items():
            self._planned.setdefault(mode, {}).update(dict.fromkeys(filter(wanted, descriptors)))
        self._capture_descs.clear()

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def _plan_short(self) -> None:
        """Each graph for a mixed batch a second time, for short queries alone."""
        longest = SHORT_ROWS // _heads_of_a_kv_head(self.vllm_config)
        if longest < self.decode_query_len:
            return  # there are no such steps
        full = self._planned.get(CUDAGraphMode.FULL, {})
        twins = {
            one: replace(one, max_query_len=longest)
            for one in full
            if not _decodes(one) and longest < one.num_tokens <= longest * one.num_reqs
        }
        full.update(dict.fromkeys(twins.values()))
        for candidates in self._candidates.values():
            candidates += [twins[one] for one in candidates if one in twins]

    def _keep(self, wanted: Callable[[BatchExecutionDescriptor], bool]) -> None:
        """Capture these graphs alone. The widest is captured first, because its output holds all others."""
        for mode, found in self._planned.items():
            self._capture_descs[mode] = sorted(filter(wanted, found), key=lambda one: one.num_tokens, reverse=True)
        known = {one for found in self._capture_descs.values() for one in found}
        for key, candidates in self._candidates.items():
            self._candidates[key] = sorted((one for one in dict.fromkeys(candidates) if one in known), key=_rank)

    def capture(
        self,
        model: Any,
        model_state: Any,
        input_buffers: Any,
        intermediate_tensors: Any,
        block_tables: Any,
        attn_groups: Any,
        kv_cache_config: Any,
        *arguments: Any,
        **more: Any,
    ) -> None:
        """Leaves out what the attention backends cannot do or have no use for; they are known only now."""
        if self._planned and self.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE:
            self.any_step = captures_any_step(self.vllm_config, model_state, attn_groups)
            short = all(group.backend.get_name() == SHORT_TILES for groups in attn_groups for group in groups)
            self._keep(
                lambda one: (
                    one.cg_mode != CUDAGraphMode.FULL
                    or _decodes(one)
                    or (self.any_step and (short or one.max_query_len is None))
                )
            )
        before, after = (model, model_state, input_buffers, intermediate_tensors), (block_tables, attn_groups)
        super().capture(*before, *after, kv_cache_config, *arguments, **more)
        inputs = (model_state, input_buffers, *after, kv_cache_config)
        self._prepare = functools.partial(_prepare, inputs, more.get("pcp_manager"))
        _managers[id(self.vllm_config)] = self

    def decode_replays(self) -> dict[int, dict[int, Replay]]:
        """By width and number of requests: the captured verify pass."""
        replays: dict[int, dict[int, Replay]] = {}
        for one, graph in self.graphs.items():
            if _decodes(one) and one.num_active_loras == 0:
                replay = Replay(graph.replay, functools.partial(self._prepare, one))
                replays.setdefault(one.uniform_token_count - 1, {})[one.num_reqs] = replay
        return replays

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        max_query_len: int | None = None,
        *arguments: Any,
        **more: Any,
    ) -> BatchExecutionDescriptor:
        """vLLM does not say how long the queries of a mixed batch are, lest it be taken for a decode
        step; here that is known, and with these graphs it makes no difference."""
        if max_query_len is None and self.step and self.any_step:
            max_query_len = max(self.step.values())
        self.step = None
        return super().dispatch(
            num_reqs, num_tokens, uniform_token_count, num_active_loras, max_query_len, *arguments, **more
        )


def _prepare(inputs: tuple[Any, ...], context_parallel: Any, one: BatchExecutionDescriptor) -> None:
    """Give a decode graph the inputs that it was captured with. Beside those of another batch, as of the graph that was
    captured last, FlashAttention 3 need not end: it shares its work out by a schedule that is among them."""
    prepare_inputs_to_capture(
        one.num_reqs,
        one.num_tokens,
        *inputs,
        full_cudagraph=True,
        max_query_len=one.uniform_token_count,
        pcp_manager=context_parallel,
    )


def _decodes(one: BatchExecutionDescriptor) -> bool:
    """Whether a full graph is for decode steps alone."""
    return one.uniform_token_count is not None


def captures_any_step(config: Any, model_state: Any, attn_groups: Any) -> bool:
    """Whether a full graph can replay a step of requests of which some are in their prefill: the attention backends say
    so.
    Images, encoders, context that several ranks share and a KV cache that travels are left to the graphs that vLLM has:
    what the host does there differs from step to step, or comes between two layers."""
    parallel = config.parallel_config
    if model_state.supports_mm_inputs or config.cache_config.kv_sharing_fast_prefill or config.kv_transfer_config:
        return False
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        return False
    support = get_attn_cg_support(attn_groups, config).narrow(*model_state.get_additional_cg_support())
    return bool(support.min_cg_support == AttentionCGSupport.ALWAYS)


def _heads_of_a_kv_head(config: Any) -> int:
    model, parallel = config.model_config, config.parallel_config
    return int(model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel))


def _rank(descriptor: BatchExecutionDescriptor) -> tuple[bool, bool, bool, int]:
    """Full graphs before others; among them decode steps, then steps of short queries, then any steps."""
    return (
        descriptor.cg_mode != CUDAGraphMode.FULL,
        descriptor.uniform_token_count is None,
        descriptor.max_query_len is None,
        descriptor.num_tokens,
    )


def _sizes_for(width: int, settings: ResolvedSettings, sizes: Any, limit: int) -> Any:
    """vLLM's compilation config with the sizes of a width's decode steps, where its limit has room for every width."""
    most = sizes.max_cudagraph_capture_size or 0
    if reach(settings, limit) > most:
        return sizes  # as the user chose them
    return _with_sizes(sizes, [size for size in decode_sizes(settings, width, limit) if size <= most])


def draft_sizes(config: Any, most: int) -> Any:
    """vLLM's compilation config with the sizes of draft steps where only those of up to `most` requests can pay. Graphs
    of larger ones take the longest to capture, so few batch sizes have one."""
    sizes, limit = config.compilation_config, config.scheduler_config.max_num_seqs
    usual = [size for size in sizes.cudagraph_capture_sizes or () if size <= limit]
    return _with_sizes(sizes, [size for size in usual if size <= most or size in (*REQUESTS, usual[-1])])


def _with_sizes(sizes: Any, chosen: list[int]) -> Any:
    """vLLM's compilation config with other sizes to capture."""
    found = copy.copy(sizes)
    found.cudagraph_capture_sizes = chosen
    return found
