"""The draft loop of the V2 model runner, on the device: the layers that draft, one step, all steps of a round, and the
CUDA graphs that they are captured into. When it runs and what it starts from is in speculator.py.

Captured, the loop ends on the device (device_loop.py) as soon as every gate is closed, on all tensor-parallel ranks
alike. Where that cannot be had, k steps are captured one after the other, and closed requests do no
attention work in them; where an attention backend cannot update its metadata in place, each step is a graph of its own.
Without graphs the host launches each step."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.fitted_weights import FittedWeights
from selfspec_cli.early_exit.view import drafting_layers
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.contexts import kernel_for
from selfspec_cli.vllm_plugin.contexts.base import ContextKernel
from selfspec_cli.vllm_plugin.decoder import place_of
from selfspec_cli.vllm_plugin.exit_head import fitted_for, load_exit_head
from selfspec_cli.vllm_plugin.fused_step.drafting import FusedStep, fused_step
from selfspec_cli.vllm_plugin.spec_config import set_strict, settings_of
from selfspec_cli.vllm_plugin.trunk import DraftPositions, attention_names, first_layers, layer_maker
from selfspec_cli.vllm_plugin.v2 import device_loop, step_times
from selfspec_cli.vllm_plugin.v2.graphs import draft_sizes, manager_of
from selfspec_cli.vllm_plugin.v2.kernels import EndStep
from selfspec_cli.vllm_plugin.v2.state import DraftState, Free
from selfspec_cli.vllm_plugin.v2.widths import widths
from selfspec_cli.vllm_plugin.vllm_names import (
    AttentionCGSupport,
    BatchDescriptor,
    CUDAGraphMode,
    SpeculatorBatchDescriptor,
    SpeculatorCudaGraphManager,
    TargetDependentARSpeculator,
    build_attn_metadata,
    build_slot_mappings_by_layer,
    gumbel_sample,
    init_attn_backend,
    init_logger,
    set_forward_context,
)
from selfspec_cli.vllm_plugin.weights.copied import Watch, renew
from selfspec_cli.vllm_plugin.weights.shared import all_on_own_weights, without_adapters

logger = init_logger("vllm.selfspec")  # below vLLM's own logger, which users configure


class DraftLoop(TargetDependentARSpeculator):
    """The layers that draft, and the loop over their steps on the device. vLLM's class keeps the runner's interface."""

    _loop: device_loop.DeviceLoop | None = None
    _capturing = False

    def __init__(self, vllm_config: vllm.VllmConfig, device: torch.device, requests: vllm.RequestState) -> None:
        super().__init__(vllm_config, device)
        settings = settings_of(vllm_config)
        assert settings is not None
        set_strict(settings.strict)
        self.settings = settings
        self.state = DraftState(
            self.input_buffers,
            self.idx_mapping,
            self.sample_src_positions,
            self.draft_tokens,
            self.current_draft_step,
            self.max_model_len,
            settings.table,
            *self._free(requests),
            settings.measures,
        )
        # The base class feeds hidden states back; nothing does here.
        self.hidden_states: Tensor = torch.empty(0, device=device)
        self.draft_attn_layer_names: set[str] = set()  # to the runner: layers beyond the target's. There are none.
        self.positions = DraftPositions(vllm_config, self.max_num_tokens, device)
        self._weights: Watch | None = None  # of the target, once it is loaded
        self._context: ContextKernel | None = None  # of what drafts leave out, once there is a KV cache

    def _free(self, requests: vllm.RequestState) -> tuple[Free | None, Tensor | None]:
        """Limits of prompt-lookup drafts, and the token ids of all requests, int32 [requests, length], which each round
        searches. Both are None without such drafts."""
        settings = self.settings
        if not settings.free_drafts:
            return None, None
        text = requests.all_token_ids.gpu
        if text.device.type == "cuda":  # vLLM keeps them in host memory, except for its own n-gram drafts
            text = requests.all_token_ids.gpu = torch.zeros_like(text)
        return Free(settings.free_drafts, settings.k, settings.free_requests, not settings.layers_draft), text

    def load_model(self, target_model: nn.Module) -> None:
        """Take the layers that draft from the target, without adapters. Only an exit head is loaded from disk."""
        began = time.perf_counter()
        target_model, settings = without_adapters(target_model), self.settings
        self._target = target_model
        fitted = fitted_for(settings, target_model, self.vllm_config)
        self.model, self.fused_step, self._trunk_pays = self._layers(target_model, fitted)
        self.head = load_exit_head(settings, target_model, self.vllm_config, fitted)
        self._weights = Watch(target_model)
        self._layer_names = attention_names(self.model, self.vllm_config)
        self.end_step = EndStep(self.max_num_reqs, self.head.draft_vocab_size, self.head.vocab_ids, self.device)
        logger.info("early exit: the layers that draft are ready after %.2f s", time.perf_counter() - began)

    def _layers(self, target: nn.Module, fitted: FittedWeights | None) -> tuple[nn.Module, FusedStep | None, bool]:
        """The layers that draft, one kernel for all of them where there is one, and whether drafts without it can pay.
        A kernel that has every number of tokens alone holds copies. What it does not run then (more requests, and
        vLLM's profiling run) multiplies by the target's weights, which is as slow as a plain step for all layers."""
        settings, config, skipped = self.settings, self.vllm_config, self.settings.skipped
        place, count = place_of(target), len(drafting_layers(settings.layer, skipped))
        decoder, pays = place.decoder, count < len(place.layers)
        if DRAFT_WEIGHTS[settings.draft_weights].copies:
            made_layer = layer_maker(target, settings.layer, config, skipped=skipped)
            own: Sequence[nn.Module] = [made_layer(number) for number in range(count)]
            if all_on_own_weights(own):
                copied = layer_maker(target, settings.layer, config, settings.draft_weights, skipped, fitted)
                step = fused_step(decoder, own, copied, config, self.device, alone=True)
                if step is not None:
                    return first_layers(target, settings.layer, config, skipped=skipped, compiled=pays), step, pays
        trunk = first_layers(target, settings.layer, config, settings.draft_weights, skipped, fitted)
        layers: Sequence[nn.Module] = trunk.drafting_layers  # type: ignore[assignment]
        return trunk, fused_step(decoder, layers, layers.__getitem__, config, self.device, alone=False), True

    def renew(self) -> None:
        """After the target's weights changed, rebuild what was made from them, in the memory that CUDA graphs read."""
        renew(self.model, self.head, self.settings, self.vllm_config)
        if self.fused_step is not None:
            self.fused_step.renew(copies=self.settings.draft_weights_path is None)
        if self._weights is not None:
            self._weights.stale = False

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        """The base class's hook for loading weights; `load_model` above needs none."""
        raise NotImplementedError("early exit has no draft model of its own")

    def set_attn(
        self,
        model_state: vllm.ModelState,
        kv_cache_config: vllm.KVCacheConfig,
        block_tables: vllm.BlockTables,
        target_input_buffers: vllm.InputBuffers,
        target_attn_groups: list[list[vllm.AttentionGroup]],
    ) -> None:
        """Take over the KV cache, and build attention metadata for draft steps. With the KV cache the model's context
        length is final: `max_model_len=auto` may have shortened it since this speculator was created."""
        self.state.max_model_len = self.vllm_config.model_config.max_model_len
        self.model_state, self.kv_cache_config, self.block_tables = model_state, kv_cache_config, block_tables
        self._find_groups()

    def _find_groups(self) -> None:
        self.attn_groups, self.attn_cg_support, _ = init_attn_backend(
            self.kv_cache_config, self.vllm_config, self.device, active_layer_names=self._layer_names
        )
        drafting = [group for groups in self.attn_groups for group in groups]
        measures = self.settings.chooses_width
        self._context = kernel_for(self.settings.context, drafting, self._layer_names, self.vllm_config, measures)
        # vLLM's attention in chunks inherits its backend's answer, although it splits requests on the host each step.
        on_device = self.attn_cg_support.min_cg_support != AttentionCGSupport.NEVER
        updates = all(group.supports_draft_decode_metadata_update for group in drafting)
        self.supports_decode_metadata_update = on_device and updates

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Draft steps replay as full graphs or run eagerly; there is no prefill to capture."""
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        mode, config = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE, self.vllm_config
        if self.fused_step is not None and not self._trunk_pays:
            config = copy.copy(config)
            config.compilation_config = draft_sizes(config, self.fused_step.most)
        self.decode_cudagraph_manager = SpeculatorCudaGraphManager(config, self.device, mode, decode_query_len=1)

    def capture(self) -> None:
        """Record the whole draft loop (or one step of it) for each batch size."""
        assert self.decode_cudagraph_manager is not None
        if not self.settings.layers_draft:
            self._measure_steps()
            return
        began = time.perf_counter()
        self._prepare_loop()
        reason = None
        try:
            self._capture_all()
        except RuntimeError as error:
            if self._loop is None or not self._several_ranks:
                raise
            reason = f"the loop cannot be captured ({' '.join(str(error).split())[:160]})"
        if self._loop is not None and self._several_ranks and (reason := device_loop.agreed(reason)) is not None:
            self._no_loop(reason)
            self.decode_cudagraph_manager.graphs.clear()
            self.decode_cudagraph_manager.pool = torch.cuda.graph_pool_handle()  # the other one may still be recording
            self._capture_all()
        graphs = len(self.decode_cudagraph_manager.graphs)
        seconds = time.perf_counter() - began
        logger.info("early exit: the draft loop is captured after %.2f s, graphs: %d", seconds, graphs)
        if self.settings.measures:
            self._measure_steps()

    def _measure_steps(self) -> None:
        """Time the graphs that were just captured, for the rule that chooses draft lengths."""
        manager, target = self.decode_cudagraph_manager, manager_of(self.vllm_config)
        if manager is None or target is None:
            return
        drafts: dict[int, step_times.Replay] | None = None
        if self.settings.layers_draft:
            drafts = {
                one.num_tokens: step_times.Replay(functools.partial(self._replay_one_step, graph))
                for one, graph in manager.graphs.items()
            }
        kv_token = drafting = 0.0
        for group in self.kv_cache_config.kv_cache_groups:
            of_a_layer = group.kv_cache_spec.page_size_bytes / group.kv_cache_spec.block_size
            kv_token += of_a_layer * len(group.layer_names)
            drafting += of_a_layer * len(self._layer_names.intersection(group.layer_names))
        attended = math.inf if self._context is None else self.settings.context.shortened.attended(math.inf)
        replays = target.decode_replays()
        step_times.measure(self.vllm_config, replays, drafts, kv_token, attended, drafting / kv_token)
        self.state.forget()
        self.state.progress.counts.zero_()

    def _replay_one_step(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay a draft loop with one row that counts as drafting, and no request: it ends after a step."""
        self.state.progress.step.zero_()
        self.state.progress.active.fill_(1)
        graph.replay()

    def _capture_all(self) -> None:
        manager = self.decode_cudagraph_manager
        assert manager is not None
        self._capturing = True
        if self._length_is_captured:
            manager._capture_descs = {
                mode: [
                    SpeculatorBatchDescriptor(**vars(one), num_speculative_tokens=width)
                    for one in descriptors
                    for width in widths(self.settings)
                    if width
                ]
                for mode, descriptors in manager._capture_descs.items()
            }
        manager.capture(
            self._recorded,
            self.model_state,
            self.input_buffers,
            self.block_tables,
            self.attn_groups,
            self.kv_cache_config,
            progress_bar_desc="Capturing the draft loop",
        )
        self._capturing = False

    @property
    def _several_ranks(self) -> bool:
        return bool(self.vllm_config.parallel_config.tensor_parallel_size > 1)

    @property
    def _length_is_captured(self) -> bool:
        """Whether a graph is for one draft length, so that each width needs one: not if the loop ends on the device,
        which reads the round's length, or a graph of one step is replayed that often."""
        several = len(widths(self.settings)) > 2  # more than k and 0
        return several and self._loop is None and self.supports_decode_metadata_update

    def _recorded(self, *arguments: Any, **more: Any) -> None:
        """What a graph records. It also runs once before, and drafts nothing then, whatever rounds before left."""
        if not torch.cuda.is_current_stream_capturing():
            self.state.forget()
        (self._all_steps if self.supports_decode_metadata_update else self._one_step)(*arguments, **more)

    def _prepare_loop(self) -> None:
        """Find out, once, whether a captured loop can end on the device."""
        if self._loop is not None or not self.supports_decode_metadata_update:
            return
        reason = device_loop.unavailable()
        if self._several_ranks:
            reason = device_loop.agreed(reason)
        if reason is None:
            self._loop = device_loop.DeviceLoop(self.device)
            if self._several_ranks:
                reason = device_loop.reason_against_a_loop(self._loop, self.device)
        if reason is not None:
            self._no_loop(reason)

    def _no_loop(self, reason: str) -> None:
        self._loop = None
        logger.warning("drafting always takes all k steps on this device: %s", reason)

    def _run_all_steps(
        self, num_reqs: int, steps: int, batch: vllm.BatchExecutionDescriptor, upper_bound: Tensor, skip_attention: bool
    ) -> None:
        if batch.cg_mode == CUDAGraphMode.FULL:
            assert self.decode_cudagraph_manager is not None
            for groups in self.attn_groups:
                for group in groups:
                    group.map_to_kernel_block_table(self.block_tables.input_block_tables[group.kv_cache_group_id])
            self.decode_cudagraph_manager.run_fullgraph(batch)
            return
        metadata, slots = self._metadata(num_reqs, batch, upper_bound, 1, skip_attention)
        self._all_steps(num_reqs, batch.num_tokens, metadata, slots, None, batch.cg_mode, steps)

    def _run_step_by_step(
        self, num_reqs: int, steps: int, batch: vllm.BatchExecutionDescriptor, upper_bound: Tensor, skip_attention: bool
    ) -> None:
        for step in range(min(steps, self.settings.k)):
            metadata, slots = self._metadata(num_reqs, batch, upper_bound, step + 1, skip_attention)
            if batch.cg_mode == CUDAGraphMode.FULL:
                assert self.decode_cudagraph_manager is not None
                self.decode_cudagraph_manager.run_fullgraph(batch)
            else:
                self._one_step(num_reqs, batch.num_tokens, metadata, slots, None, batch.cg_mode, steps)

    def _metadata(
        self, num_reqs: int, batch: vllm.BatchExecutionDescriptor, upper_bound: Tensor, step: int, skip_attention: bool
    ) -> tuple[dict[str, Any] | None, dict[str, Tensor] | None]:
        """Attention metadata and slots of one draft step, built on the host from device tensors."""
        if skip_attention:
            return None, None
        slots = self._slot_mappings(num_reqs, batch.num_tokens)
        rows = batch.num_reqs or num_reqs  # a graph pads requests; its padding has no token
        tokens = batch.num_tokens if batch.cg_mode == CUDAGraphMode.FULL else num_reqs
        lengths = torch.zeros(rows, dtype=torch.int32)
        lengths[:num_reqs] = (upper_bound[:num_reqs] + step).clamp_(max=self.state.max_model_len)
        buffers = self.input_buffers
        cached = buffers.seq_lens[:rows]  # 0 for a request that drafts no more
        if not self.supports_decode_metadata_update and batch.cg_mode != CUDAGraphMode.FULL:
            # With attention in chunks vLLM takes 0 for the end of a chunk, and looks for the blocks before the first.
            cached = cached.clamp(min=1)
        metadata = build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=rows,
            num_tokens=tokens,
            query_start_loc_gpu=buffers.query_start_loc[: rows + 1],
            query_start_loc_cpu=torch.arange(rows + 1, dtype=torch.int32).clamp_(max=num_reqs),
            max_query_len=1,
            seq_lens=cached,
            max_seq_len=self.draft_max_seq_len,
            block_tables=[table[:rows] for table in self.block_tables.input_block_tables],
            slot_mappings=self.block_tables.slot_mappings[:, :tokens],
            kv_cache_config=self.kv_cache_config,
            seq_lens_cpu_upper_bound=lengths,
            positions=buffers.positions[:tokens],
            is_prefilling=self.draft_is_prefilling[:rows],
        )
        return metadata, build_slot_mappings_by_layer(slots, self.kv_cache_config)

    def _slot_mappings(self, num_reqs: int, num_tokens_padded: int) -> Tensor:
        """KV slots [groups, tokens] for the current positions, into the persistent buffer that graphs read."""
        return self.block_tables.compute_slot_mappings(
            self.idx_mapping[:num_reqs],
            self.input_buffers.query_start_loc[: num_reqs + 1],
            self.input_buffers.positions[:num_reqs],
            num_tokens_padded,
        )

    def _all_steps(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, Tensor] | None,
        num_tokens_across_dp: Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode,
        num_speculative_steps: int,
    ) -> None:
        """The draft loop; everything in here is captured."""
        rest = slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode, num_speculative_steps

        def step() -> None:
            if attn_metadata is not None:
                self._slot_mappings(num_reqs, num_tokens_padded)
                for groups in self.attn_groups:
                    for group in groups:
                        group.update_draft_decode_metadata(attn_metadata)
            self._one_step(num_reqs, num_tokens_padded, attn_metadata, *rest)

        if self._loop is not None and torch.cuda.is_current_stream_capturing():
            self._loop.capture(self.state.progress.active, step)
            return
        if self._loop is not None and self._capturing:  # the pass before a capture
            self._loop.warm_up(step)
            self.state.forget()
        for _ in range(min(num_speculative_steps, self.settings.k)):
            step()

    def _one_step(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, Tensor] | None,
        num_tokens_across_dp: Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode,
        num_speculative_steps: int,
    ) -> None:
        """First E layers, exit head, gate, and the inputs of the step after."""
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=num_tokens_padded,
            cudagraph_runtime_mode=cudagraph_runtime_mode,
            num_tokens_across_dp=num_tokens_across_dp,
            slot_mapping=slot_mappings,
            batch_descriptor=BatchDescriptor(num_tokens=num_tokens_padded),
        ):
            hidden = self._forward(num_tokens_padded)
        with device_loop.gathering_by_kernel() if self._loop is not None and self._several_ranks else nullcontext():
            logits = self.head.logits(hidden[:num_reqs])
        drawn = None if self.draft_logits is None else self._draw(self.head.to_full_logits(logits), num_reqs)
        self.end_step(self.state, logits, drawn)

    def _forward(self, num_tokens: int) -> Tensor:
        """The first E layers on the persistent inputs -> normed hidden states [num_tokens, hidden]."""
        if self.fused_step is not None:
            hidden = self.fused_step(num_tokens, self.input_buffers)
            if hidden is not None:
                return hidden
        positions = self.positions.of(self.input_buffers.positions[:num_tokens])
        return self.model(self.input_buffers.input_ids[:num_tokens], positions, intermediate_tensors=None)

    def _draw(self, logits: Tensor, num_reqs: int) -> Tensor:
        """Tokens [n] drawn from logits [n, V] at each request's temperature; keeps the logits for the verifier."""
        return gumbel_sample(
            logits,
            self.idx_mapping[:num_reqs],
            self.temperature,
            self.seeds,
            self.sample_src_positions[:num_reqs],
            apply_temperature=True,
            is_drafting=True,
            logits_cache=self.draft_logits,
            logits_cache_col=self.current_draft_step,
            use_fp64=self.use_fp64_gumbel,
        )
