"""The draft loop on vLLM's V1 model runner, which is what runs on the CPU.

Where a round begins: the verify pass has written keys and values for every token before the newest one into all
layers, and the newest token (just sampled) is in the host's input batch. A draft step runs that token through the
first E layers at the next position, which also writes its keys and values there; the next verify pass runs the same
tokens at the same positions through all layers and overwrites them. So drafting needs no prefill, and a rejected
draft leaves nothing behind that is ever read.

Proposals are ragged lists, one a request, the way vLLM's n-gram proposer returns them: a request whose gate closed
after two steps is verified with two draft tokens, not with k."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfspec_cli.early_exit.counters import DraftCounters
from selfspec_cli.early_exit.draft_log import DraftRecorder
from selfspec_cli.early_exit.length_table import LengthTable
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.contexts import kernel_for
from selfspec_cli.vllm_plugin.exit_head import fitted_for, load_exit_head
from selfspec_cli.vllm_plugin.live_gate import LiveGate
from selfspec_cli.vllm_plugin.refusals import require_runner
from selfspec_cli.vllm_plugin.spec_config import set_strict, settings_of
from selfspec_cli.vllm_plugin.trunk import DraftPositions, attention_names, first_layers
from selfspec_cli.vllm_plugin.v1.lengths import DraftLengths, FreeDrafts, StepWorth
from selfspec_cli.vllm_plugin.v1.round import Ahead, Round
from selfspec_cli.vllm_plugin.v1.sampling import draw, not_to_draft
from selfspec_cli.vllm_plugin.vllm_names import CommonAttentionMetadata, DraftModelProposer, set_forward_context
from selfspec_cli.vllm_plugin.weights.copied import Watch, renew
from selfspec_cli.vllm_plugin.weights.shared import without_adapters


def with_early_exit(original: type[DraftModelProposer]) -> type[DraftModelProposer]:
    """Replacement for the V1 runner's `DraftModelProposer`: early exit where it is configured, vLLM's own elsewhere.
    A subclass, because the runner also uses the name in isinstance checks."""

    class DraftModelOrEarlyExit(original):
        def __new__(cls, vllm_config: vllm.VllmConfig, *args: Any, **kwargs: Any) -> DraftModelProposer:
            early_exit = settings_of(vllm_config) is not None
            return object.__new__(EarlyExitProposer if early_exit else cls)

    class EarlyExitProposer(_EarlyExit, DraftModelOrEarlyExit):
        pass

    return DraftModelOrEarlyExit


class _EarlyExit(DraftModelProposer):
    """Overrides of vLLM's DraftModelProposer; the base class keeps the interface that the runner calls."""

    new_recorder = DraftRecorder

    def __init__(self, vllm_config: vllm.VllmConfig, device: torch.device, runner: Any = None) -> None:
        # Not as a draft model, which could draft neither from an unpadded batch nor at positions of several dimensions.
        super(DraftModelProposer, self).__init__(vllm_config, device, pass_hidden_states_to_model=True, runner=runner)
        require_runner(device.type, v2=False)
        settings = settings_of(vllm_config)
        assert settings is not None
        set_strict(settings.strict)
        self.settings = settings
        self.gate = LiveGate(settings.gate.kind, settings.threshold)
        self.lengths = DraftLengths(settings, int(vllm_config.model_config.hf_text_config.num_hidden_layers))
        self.worth = StepWorth() if settings.measures else None
        self.draft_length = settings.k  # may be lowered between two rounds, to 0 for no drafts
        self.counters = DraftCounters(settings.k)
        self.free = FreeDrafts(settings, self.counters, self._text) if settings.free_drafts else None
        self.recorder: DraftRecorder | None = None  # only while a record is wanted
        self.runner = runner
        self._sampled: list[list[int]] = []
        self._verified: Sequence[int] | None = None
        self._draft_probs: Tensor | None = None
        self._groups: list[tuple[vllm.AttentionGroup, list[str]]] = []
        self._positions = DraftPositions(vllm_config, self.max_num_tokens, device)
        # Drafting follows the host's bookkeeping: that is where ragged proposals and the sampled tokens are.
        self.speculative_config.disable_padded_drafter_batch = True

    def load_model(self, target_model: nn.Module) -> None:
        """Take the layers that draft from the target, without adapters. Only an exit head is loaded from disk."""
        target_model, settings = without_adapters(target_model), self.settings
        fitted = fitted_for(settings, target_model, self.vllm_config)
        self.model = first_layers(
            target_model, settings.layer, self.vllm_config, settings.draft_weights, settings.skipped, fitted
        )
        self._layer_names = attention_names(self.model, self.vllm_config)
        self.head = load_exit_head(settings, target_model, self.vllm_config, fitted)
        self._weights = Watch(self.runner.get_model())

    def renew(self) -> None:
        """Rebuild what was made from the target's weights, after these have changed."""
        renew(self.model, self.head, self.settings, self.vllm_config)
        self._weights.stale = False

    def initialize_attn_backend(
        self, kv_cache_config: vllm.KVCacheConfig, kernel_block_sizes: list[int] | None = None
    ) -> None:
        """Draft in all of the target's own attention groups, of which a hybrid model has several. With the KV cache the
        model's context length is final: `max_model_len=auto` may have shortened it since this proposer was created."""
        max_model_len = self.vllm_config.model_config.max_model_len
        # Requests near max_model_len draft less (see `_start`); vLLM would switch drafting off for the whole batch.
        self.runner.effective_drafter_max_model_len = max_model_len + self.num_speculative_tokens
        self._last_useful = max_model_len - 1  # a token drafted from there would have no place in the model
        self._find_groups()

    def set_view(self, settings: ResolvedSettings) -> None:
        """Draft with other layers or weights from the next round on; see `worker.early_exit_set_view`."""
        self.settings = settings
        self.load_model(self.runner.get_model())
        self._find_groups()

    def set_table(self, table: LengthTable) -> None:
        """Other draft lengths by load from the next round on; see `worker.early_exit_set_length_table`."""
        self.lengths.table = table

    def set_chooses_width(self, on: bool) -> None:
        """Choose draft lengths by measured times if `on`, else by the length table, from the next round on."""
        self.lengths.chooses_width = on

    def _find_groups(self) -> None:
        """Find the target's attention groups that hold a drafting layer, each with the names of these layers."""
        of_target = [group for groups in self.runner.attn_groups for group in groups]
        held = [[name for name in group.layer_names if name in self._layer_names] for group in of_target]
        self._groups = [(group, names) for group, names in zip(of_target, held, strict=True) if names]
        self.draft_attn_groups = drafting = [group for group, _ in self._groups]
        self._context = kernel_for(self.settings.context, drafting, self._layer_names, self.vllm_config, measures=False)
        self.kv_cache_gid = drafting[0].kv_cache_group_id

    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Compile the trunk together with the target, in vLLM's warm-up and profiling runs."""
        if not self.settings.layers_draft:
            return
        # Zeros: a batch may hold more tokens than the model has positions, and compiled code reads its table of them.
        positions = self._positions.of(torch.zeros_like(self.arange[:num_tokens], dtype=torch.int64))
        with set_forward_context(None, self.vllm_config, num_tokens=num_tokens):
            self.model(self.input_ids[:num_tokens], positions, intermediate_tensors=None)

    def prepare_next_token_ids_cpu(self, sampled_token_ids: list[list[int]], *args: Any) -> Tensor:
        """Remember which requests sampled a token. A request inside a chunked prefill has an empty list."""
        self._sampled, self._verified = sampled_token_ids, None
        return self._nothing

    def prepare_inputs(
        self, common_attn_metadata: CommonAttentionMetadata, sampled: Any, verified: Sequence[int], *args: Any
    ) -> tuple[CommonAttentionMetadata, Tensor]:
        """Remember how many draft tokens of each request were verified. Called only after a step with drafts.
        The runner gathers hidden states for drafters that need them; this one needs none."""
        self._verified = verified
        return common_attn_metadata, self._nothing

    _nothing = torch.empty(0, dtype=torch.int64)

    def take_last_draft_probs(self) -> Tensor | None:
        """Draft distributions [requests, k, vocabulary] of the last round, for probabilistic drafts."""
        return self._draft_probs

    @torch.inference_mode()
    def propose(
        self,
        num_speculative_tokens: int,
        *,
        sampling_metadata: vllm.SamplingMetadata,
        common_attn_metadata: CommonAttentionMetadata | None = None,
        **unused: Any,
    ) -> list[list[int]]:
        """Token ids drafted for each request, in batch order, where it sampled a token in this step: up to k that the
        model drafted, then those that prompt lookup copied."""
        began = time.perf_counter()
        batch = self.runner.input_batch
        sampled, verified = self._sampled, self._verified
        if self.free is not None:
            sampled, verified = self.free.verdict(batch.req_ids, sampled, verified)
        self.lengths.verdict(batch.req_ids, self._sampled, self._verified)
        if self.worth is not None:
            self.worth.verdict(batch.req_ids, sampled)
        if self.recorder is not None:
            self.recorder.verdict(batch.req_ids, sampled, verified)
        proposals: list[list[int]] = [[] for _ in range(batch.num_reqs)]
        self._draft_probs = None
        if self._weights.stale:
            self.renew()
        if self._context is not None and common_attn_metadata is not None:
            drafted = self._verified or [0] * len(self._sampled)
            rejected = [count - max(len(tokens) - 1, 0) for count, tokens in zip(drafted, self._sampled, strict=True)]
            self._context.begin(common_attn_metadata.query_start_loc[1 : len(rejected) + 1], torch.tensor(rejected))
        state = self._start(batch, min(num_speculative_tokens, self.draft_length), proposals)
        probs = [] if state is None else self._draft(state, proposals, sampling_metadata)
        if self._draws(sampling_metadata) and any(proposals):
            self._draft_probs = self._stack_probs(probs, proposals, num_speculative_tokens)
        self.counters.seconds += time.perf_counter() - began
        return proposals

    def _draws(self, sampling_metadata: vllm.SamplingMetadata) -> bool:
        """Whether drafts are drawn at random, so that the verifier needs the distributions they came from."""
        spec = self.speculative_config
        probabilistic = (spec.rejection_sample_method, spec.draft_sample_method) == ("standard", "probabilistic")
        return probabilistic and not sampling_metadata.all_greedy

    def _draft(
        self, state: Round, proposals: list[list[int]], sampling_metadata: vllm.SamplingMetadata
    ) -> list[tuple[Tensor, Tensor]]:
        """Run the draft loop, which appends to `proposals`.
        Returns: for each step, if drafts are drawn, its rows [n] and their distributions [n, vocabulary]."""
        batch, limit = self.runner.input_batch, state.steps
        probabilistic = self._draws(sampling_metadata)
        probs: list[tuple[Tensor, Tensor]] = []
        some_copied = any(proposals)
        for step in range(limit):
            last = step + 1 == limit
            worth = self.worth if step or some_copied else None  # the first step is made, as in v2/worth._turn
            if worth is not None and not worth.another_step(state.rows, self.lengths.choice):
                self.counters.ended_early()
                break
            logits, best, open_ = self._decide(state, batch.req_ids, last)
            if probabilistic:
                tokens, step_probs = self._sample(logits, state.rows, sampling_metadata)
                probs.append((state.rows, step_probs))
            else:
                tokens = self.head.to_full_ids(best)
            for row, token in zip(state.rows.tolist(), tokens.tolist(), strict=True):
                proposals[row].append(token)
            self.counters.step(len(state.rows))
            if self.free is not None:
                copied = torch.tensor([self.free.copy(row, proposals[row]) for row in state.rows.tolist()])
                open_ = ~copied if open_ is None else open_ & ~copied
            if last:
                break
            state.tokens, state.positions = tokens.int(), state.positions + 1
            if not self._go_on(state, open_, step + 1):
                self.counters.ended_early()
                break
        return probs

    def _go_on(self, state: Round, open_: Tensor | None, steps: int) -> bool:
        """Drop the requests that stop drafting after `steps` steps. Returns whether any is left.
        Most steps stop no request, and indexing every tensor of the round would cost as much as the gate itself."""
        masks = [] if open_ is None else [open_]
        if steps >= state.room:
            masks.append(state.positions < self._last_useful)
        if state.lengths is not None:
            masks.append(state.lengths > steps)
        if not masks:
            return True
        going = functools.reduce(torch.logical_and, masks)
        left = going.tolist()
        if any(left) and not all(left):
            state.keep(going)
        return any(left)

    def _decide(self, state: Round, ids: Sequence[str], last: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run one draft step: its logits [n, V], their argmax [n], and which requests go on, bool [n] (None: all, or
        the last step).
        Logits with NaN or infinity close every gate, `none` too, and are counted. They are replaced by zeros, so that
        the sampler gets a proper distribution and the verifier a token that it will hardly accept."""
        logits = self.head.logits(self._forward(state))  # [n, V]
        best = logits.max(-1)  # NaN counts as the largest; so does +inf
        names = [ids[row] for row in state.rows.tolist()]
        stands = None if self.worth is None else self.worth.step(names, state.rows, logits)
        if self.recorder is not None:
            self.recorder.step(names, logits)
        if all(map(math.isfinite, best.values.tolist())):
            return logits, best.indices, None if last else _both(self.gate.decide(logits, state), stands)
        bad = ~torch.isfinite(best.values)
        self.counters.nan_logits += int(bad.sum())
        logits = logits.masked_fill(bad.unsqueeze(1), 0.0)
        open_ = None if last else self.gate.decide(logits, state)
        return logits, logits.argmax(-1), _both(_both(open_, stands), ~bad)

    def _text(self, row: int) -> Tensor:
        """All tokens [n] of the request in a row of the batch, including those just sampled."""
        batch = self.runner.input_batch
        return torch.from_numpy(batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]])

    def _start(self, batch: Any, limit: int, proposals: list[list[int]]) -> Round | None:
        """State of a new round: the requests that sampled a token, may draft, and have room for another token; None if
        none does. A request with a prompt-lookup draft gets that into `proposals` and drafts nothing itself."""
        alone = not_to_draft(batch, self.runner.requests)
        rows = [row for row, sampled in enumerate(self._sampled) if sampled and row not in alone]
        rows = [row for row in rows if not self._ended(row)] if limit else []
        names, ends = [batch.req_ids[row] for row in rows], batch.num_tokens_no_spec[rows].tolist() if rows else []
        allowed = self.lengths.budgets(self.runner.requests, batch.num_reqs, names, [end - 1 for end in ends])
        kept = [place for place, budget in enumerate(allowed) if budget.k]
        self.counters.allowed(limit, [(budget.k, budget.off) for budget in allowed])
        if self.free is not None:
            longest = [budget.room if limit >= self.settings.k else min(budget.room, limit) for budget in allowed]
            rooms = [min(room, self._last_useful + 1 - end) for room, end in zip(longest, ends, strict=True)]
            lengths = [min(budget.k, limit) if self.settings.layers_draft else 0 for budget in allowed]
            cost = 1.0 if self.lengths.choice is None else self.lengths.choice.step_cost
            self.free.begin(self.runner.requests, names, rows, rooms, lengths, cost / max(1, len(rows)))
            copied = {row for row in rows if self.free.copy(row, proposals[row])}
            kept = [place for place in kept if lengths[place] and rows[place] not in copied]
            if copied and not kept:
                self.counters.round(len(copied))
                self.counters.ended_early()
        if not kept:
            return None
        allowed = [allowed[place] for place in kept]
        index = torch.tensor([rows[place] for place in kept])
        last = torch.tensor([ends[place] - 1 for place in kept])  # position of the token just sampled
        tokens = torch.from_numpy(batch.token_ids_cpu)[index, last].int()
        lengths = [min(budget.k, limit) for budget in allowed]
        state = Round(index, tokens, last, self._last_useful - int(last.max()), max(lengths))
        if min(lengths) < state.steps:
            state.lengths = torch.tensor(lengths)
        thresholds = [budget.threshold for budget in allowed]
        # A request's threshold is meant for the gate that the engine was started with.
        if any(threshold is not None for threshold in thresholds) and self.gate.kind == self.settings.gate.kind:
            state.limits = torch.tensor([self.gate.limit(threshold) for threshold in thresholds])
        if state.room <= 0:
            state.keep(last < self._last_useful)
        if not len(state.rows):
            return None
        self.counters.round(len(state.rows))
        return state

    def _ended(self, row: int) -> bool:
        """Whether the request in a row of the batch has its `max_tokens`, which the scheduler does not know yet."""
        batch = self.runner.input_batch
        parameters = self.runner.requests[batch.req_ids[row]].sampling_params
        limit = None if parameters is None else parameters.max_tokens
        return limit is not None and batch.num_tokens_no_spec[row] - batch.num_prompt_tokens[row] >= limit

    def _forward(self, state: Round) -> Tensor:
        """Run tokens [n] at positions [n] through the E layers. Returns normed hidden states [n, hidden]."""
        if state.ahead is None:
            batch = self.runner.input_batch
            tables = [batch.block_table[group.kv_cache_group_id] for group, _ in self._groups]
            state.ahead = Ahead.of(state, self.settings.k, tables, batch.num_reqs, self._context)
        if self._positions.several:
            requests, ids = self.runner.requests, self.runner.input_batch.req_ids
            shifts = [requests[ids[row]].mrope_position_delta for row in state.rows.tolist()]
            self._positions.shifts[: len(shifts)] = torch.tensor(shifts)
        metadata, slots = state.ahead.metadata(self._groups, self.arange)
        with set_forward_context(metadata, self.vllm_config, num_tokens=len(state.rows), slot_mapping=slots):
            return self.model(state.tokens, self._positions.of(state.positions), intermediate_tensors=None)

    def _sample(self, logits: Tensor, rows: Tensor, sampling: vllm.SamplingMetadata) -> tuple[Tensor, Tensor]:
        """Draft tokens [n] drawn from the head's distribution at the request's temperature, and that distribution."""
        assert sampling.temperature is not None
        full = self.head.to_full_logits(logits)  # [n, vocabulary], -inf outside a draft vocabulary
        seeded = sampling.generators
        generators = {place: seeded[row] for place, row in enumerate(rows.tolist()) if row in seeded}
        return draw(full, sampling.temperature[rows], generators)

    def _stack_probs(self, probs: list[tuple[Tensor, Tensor]], proposals: list[list[int]], places: int) -> Tensor:
        """Stack the steps' distributions to [requests, places, vocabulary]; the runner reads only proposed places.
        A token that prompt lookup copied has probability 1, because nothing else could have been drafted there."""
        stacked = torch.zeros(len(proposals), places, self.vllm_config.model_config.get_vocab_size())
        drawn = [0] * len(proposals)
        for step, (rows, step_probs) in enumerate(probs):
            stacked[rows, step] = step_probs
            for row in rows.tolist():
                drawn[row] += 1
        for row, draft in enumerate(proposals):
            for place in range(drawn[row], len(draft)):
                stacked[row, place, draft[place]] = 1.0
        return stacked


def _both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Requests that both masks let go on, bool [n]. A mask None lets all go on."""
    if first is None or second is None:
        return second if first is None else first
    return first & second
