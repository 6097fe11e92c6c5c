"""The drafter of the V2 model runner, as vLLM's runner knows it: a round, and what changes on a live engine.

As v1/proposer.py, but the device never waits for the host: one kernel turns what the verify pass left into the first
draft step's inputs (round_setup.py), and then the draft loop runs (draft_loop.py). There is no draft prefill: the
shared KV cache holds everything already."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.length_table import LengthTable
from selfspec_cli.early_exit.resolved import NOTHING, ResolvedSettings
from selfspec_cli.early_exit.rule import Choice
from selfspec_cli.early_exit.settings import AUTO
from selfspec_cli.vllm_plugin import compile_cache
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.refusals import require_runner
from selfspec_cli.vllm_plugin.requests import own_settings
from selfspec_cli.vllm_plugin.spec_config import settings_of
from selfspec_cli.vllm_plugin.v2.draft_loop import DraftLoop
from selfspec_cli.vllm_plugin.v2.matches import certain
from selfspec_cli.vllm_plugin.v2.round_setup import Ending, begin_round, take_in
from selfspec_cli.vllm_plugin.v2.runner import verify_no_more_than
from selfspec_cli.vllm_plugin.v2.scheduling import planners_like
from selfspec_cli.vllm_plugin.v2.state import DeviceGate, DeviceRecorder, DraftState
from selfspec_cli.vllm_plugin.v2.step_order import DraftClock
from selfspec_cli.vllm_plugin.v2.widths import WidthPlanner
from selfspec_cli.vllm_plugin.vllm_names import dispatch_cg_and_sync_dp, init_logger, set_forward_context
from selfspec_cli.vllm_plugin.weights import lowbit
from selfspec_cli.vllm_plugin.wrap import around

logger = init_logger("vllm.selfspec")  # below vLLM's own logger, which users configure


@around
def init_with_early_exit(
    original: Callable[..., Any], vllm_config: vllm.VllmConfig, device: torch.device, req_states: vllm.RequestState
) -> Any:
    """Replacement for the V2 runner's `init_speculator`: early exit where it is configured, vLLM's own elsewhere."""
    if settings_of(vllm_config) is None:
        return original(vllm_config, device, req_states)
    require_runner(device.type, v2=True)
    speculator = EarlyExitSpeculator(vllm_config, device, req_states)
    verify_no_more_than(req_states, speculator.state.lengths)
    return speculator


class EarlyExitSpeculator(DraftLoop):
    """Drafts with the target's first E layers: when the loop runs, and what it starts from."""

    new_recorder = DeviceRecorder

    def __init__(self, vllm_config: vllm.VllmConfig, device: torch.device, requests: vllm.RequestState) -> None:
        super().__init__(vllm_config, device, requests)
        self.gate = DeviceGate(self.state, self.settings.gate.kind, self.settings.threshold)
        self._leaves_out = True  # whether drafts leave out a part of the context: `rule.StepTimes.leaves_out`
        self.drafting_disabled = False  # whether the last round drafted nothing, and took in the verdict before it
        self._new: dict[int, tuple[Any, int]] = {}  # by slot: requests that the device does not know yet
        self.clock = DraftClock(device)
        self.recorder: DeviceRecorder | None = None  # only while a record is wanted
        self._warm = False

    def set_view(self, settings: ResolvedSettings) -> None:
        """Draft with other layers or weights from the next round on; see `worker.early_exit_set_view`."""
        self.settings = settings
        self.load_model(self._target)
        self._warm = True  # code was compiled only for the view that the engine started with; this one runs eagerly
        self._find_groups()

    def set_table(self, table: LengthTable) -> None:
        """Other draft lengths by load from the next round on; see `worker.early_exit_set_length_table`."""
        for planner in self._planners("length_table"):
            planner.set_table(table)
        self.settings = replace(self.settings, length_table=str(table))
        self.state.set_table(table)

    def set_chooses_width(self, on: bool) -> None:
        """Choose each step's width by measured times if `on`, else by the length table, from the next step on."""
        for planner in self._planners("gate"):
            planner.chooses_width = on

    def _planners(self, key: str) -> list[WidthPlanner]:
        """This engine's width planners. Raises SettingsError, naming `key`, if the scheduler is in another process."""
        started = settings_of(self.vllm_config)
        assert started is not None
        planners = planners_like(started)
        if not planners:
            raise SettingsError(
                f"{key}: the scheduler of this engine runs in another process, as with tensor parallelism"
            )
        return planners

    def set_choice(self, choice: Choice) -> None:
        """Take from the scheduler's rule, for the drafts after the coming step, the value and cost of a draft step, and
        whether drafts leave out a part of the context."""
        self.state.step_value, self.state.step_cost = choice.step_value, choice.step_cost
        if self.settings.context.is_auto:
            leaves_out = choice.leaves_out and choice.measured
        else:  # what a user names with another gate is done
            leaves_out = choice.leaves_out or self.gate.kind != AUTO
        if self._leaves_out and not leaves_out:
            self.state.left_out.zero_()  # a round that leaves nothing out does not write it
        self._leaves_out = leaves_out

    def add_requests(self, slots: list[int], parameters: list[Any], prompts: list[int], verified: bool) -> None:
        """Note new requests before their first step; they are sent to the device only before drafts are verified or a
        round begins, so a server with drafting disabled sends nothing. slots: vLLM's; parameters: the SamplingParams of
        each, or None; prompts: lengths in tokens; verified: whether the coming step verifies drafts."""
        self._new.update(zip(slots, zip(parameters, prompts, strict=True), strict=True))
        if verified:
            self._take_in()

    def _take_in(self) -> None:
        """Send the requests that `add_requests` noted to the device."""
        if not self._new:
            return
        parameters, prompts = zip(*self._new.values(), strict=True)
        settings = [own_settings(params, self.settings) for params in parameters]
        own = (request.threshold for request in settings)
        limits = [math.nan if threshold is None else self.gate.limit(threshold) for threshold in own]
        ends = [Ending.of(params, length) for params, length in zip(parameters, prompts, strict=True)]
        take_in(self.state, list(self._new), settings, limits, ends)
        self._new.clear()

    @property
    def draft_length(self) -> int:
        """Most tokens drafted a round. Reading it waits for the device."""
        return int(self.state.progress.limit)

    @draft_length.setter
    def draft_length(self, k: int) -> None:
        self.state.progress.limit.fill_(k)

    @property
    def counters(self) -> DraftState:
        """The object that holds the draft loop's counters."""
        return self.state

    @torch.inference_mode()
    def propose(
        self,
        input_batch: vllm.InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, Tensor],
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        dp_sync_state: Any = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: Any = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> Tensor:
        """Token ids that are drafted for each request, int64 [num_reqs, k], without waiting for the device; 0 at places
        without a draft (runner.py).
        num_speculative_tokens: most of this round; None: k. vLLM passes fewer if it chooses by batch size."""
        if self._weights is not None and self._weights.stale:
            self.renew()
        steps = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        if self.recorder is not None and not dummy_run:
            self.recorder.verdict(input_batch, num_sampled, self.state)
        self._compile(input_batch.num_tokens_after_padding)
        verdict, drafts = (num_sampled, num_rejected, last_sampled), self.draft_tokens[: input_batch.num_reqs]
        if not steps:
            if not (self.drafting_disabled or dummy_run):
                self._begin(input_batch, steps, verdict, temperature, seeds)  # takes in the last round's verdict
                self.drafting_disabled = True
            return drafts.fill_(-1)
        self.drafting_disabled = False
        self._begin(input_batch, steps, verdict, temperature, seeds, dummy_run)
        if self.settings.layers_draft:
            if self._context is not None:
                requests = input_batch.num_reqs
                self._context.begin(input_batch.query_start_loc[1 : requests + 1], num_rejected[:requests])
            # In vLLM's profiling run there is no KV cache yet: `set_attn` comes after it.
            self._draft(input_batch, steps, is_profile, dp_sync_state, dummy_run and skip_attn_for_dummy_run)
        if self.state.free is not None and self.draft_logits is not None and not dummy_run:
            certain(self.state, input_batch, self.draft_logits)
        return drafts

    def _draft(
        self, input_batch: vllm.InputBatch, steps: int, is_profile: bool, dp_sync_state: Any, skip_attention: bool
    ) -> None:
        """Launch the draft loop of a round that has begun."""
        num_reqs, upper_bound = input_batch.num_reqs, input_batch.seq_lens_cpu_upper_bound
        longest = int(upper_bound[:num_reqs].max())  # on the host already
        self.draft_max_seq_len = min(longest + steps, self.state.max_model_len)
        if not skip_attention:
            self._leave_out(steps)
        batch, _ = dispatch_cg_and_sync_dp(
            self.decode_cudagraph_manager,
            num_reqs,
            num_reqs,
            uniform_token_count=1,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=is_profile,
            dp_sync_state=dp_sync_state,
        )
        if self.decode_cudagraph_manager is not None:
            batch = self.decode_cudagraph_manager.specialize_spec_tokens(batch, steps)
        run = self._run_all_steps if self.supports_decode_metadata_update else self._run_step_by_step
        with self.clock.drafting():
            run(num_reqs, steps, batch, upper_bound, skip_attention)

    def _begin(
        self,
        batch: vllm.InputBatch,
        steps: int,
        verdict: tuple[Tensor, Tensor, Tensor],
        temperature: Tensor,
        seeds: Tensor,
        dummy_run: bool = False,
    ) -> None:
        """Write the inputs of the round's first draft step. verdict: num_sampled, num_rejected and last_sampled."""
        self._take_in()
        self.idx_mapping.fill_(-1)
        if not dummy_run:  # a dummy batch has no requests, whatever its rows say
            self.idx_mapping[: batch.num_reqs].copy_(batch.idx_mapping)
        if self.draft_logits is not None:
            self.temperature.copy_(temperature)
            self.seeds.copy_(seeds)
        if self.positions.several and not dummy_run:  # the first dummy run comes before `set_attn`
            deltas = self.model_state.rope_state.prefill_delta.gpu  # a new tensor after each step with new requests
            self.positions.shifts[: batch.num_reqs] = deltas.index_select(0, batch.idx_mapping[: batch.num_reqs])
        # Thresholds of requests are for the gate that the engine was started with.
        begin_round(self.state, batch, steps, verdict, self.gate.kind == self.settings.gate.kind, dummy_run)

    def _leave_out(self, steps: int) -> None:
        """Leave out the part of the context that `draft_context` excludes from this round's drafts."""
        context = self._context
        if context is None or not self._leaves_out:
            return
        (group,) = {group.kv_cache_group_id for groups in self.attn_groups for group in groups}  # `refuse_context`
        size = self.block_tables.block_sizes[group]
        try:
            context.shorten(self.state, self.block_tables.input_block_tables[group], size)
        except SettingsError as refusal:  # in the first dummy run, where the KV cache is seen
            if not self.settings.context.is_auto:
                raise
            logger.info("early exit: drafts attend to the whole context (%s)", refusal)
            self._context = None
            return
        self.draft_max_seq_len = min(self.draft_max_seq_len, context.longest(size) + steps)

    def _compile(self, num_tokens: int) -> None:
        """Compile the trunk in vLLM's profiling run, for the target's shape, because torch specialises on one token."""
        if self._warm:
            return
        self._warm = True
        if not self.settings.layers_draft:
            take_in(self.state, [0], [NOTHING], [math.nan], [Ending()])
            return
        began = time.perf_counter()
        decoder: nn.Module = self.model.drafting_decoder  # type: ignore[assignment]
        layers = decoder if self.fused_step is None else None  # the kernel for all of them compiles itself
        ranks = self.vllm_config.parallel_config.tensor_parallel_size
        logits, requests = self.head.copied, self.max_num_reqs
        # Ends before the first graph is captured, which no other thread may disturb.
        with lowbit.compiled_beside(layers, logits, requests, self.device, ranks):
            if self._trunk_pays:
                with set_forward_context(None, self.vllm_config, num_tokens=num_tokens):
                    self._forward(num_tokens)
            take_in(self.state, [0], [NOTHING], [math.nan], [Ending()])  # no request waits for its compilation
        compile_cache.count_times([self._target, self.model], self.vllm_config)
        logger.info("early exit: the layers that draft are compiled after %.2f s", time.perf_counter() - began)
