"""The draft loop on vLLM's V1 model runner, which is what runs on the CPU.

Where a round begins: the verify pass has written keys and values for every token before the newest one into all
layers, and the newest token (just sampled) is in the host's input batch. A draft step runs that token through the
first E layers at the next position, which also writes its keys and values there; the next verify pass runs the same
tokens at the same positions through all layers and overwrites them. So drafting needs no prefill, and a rejected
draft leaves nothing behind that is ever read.

Proposals are ragged lists, one a request, the way vLLM's n-gram proposer returns them: a request whose gate closed
after two steps is verified with two draft tokens, not with k.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token

from selfspec_cli.early_exit.counters import DraftCounters
from selfspec_cli.early_exit.draft_log import DraftRecorder
from selfspec_cli.early_exit.settings import SettingsError
from selfspec_cli.vllm_plugin.exit_head import load_exit_head
from selfspec_cli.vllm_plugin.live_gate import LiveGate
from selfspec_cli.vllm_plugin.spec_config import settings_of
from selfspec_cli.vllm_plugin.trunk import attention_names, decoder_of, first_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.worker.utils import AttentionGroup


def with_early_exit(original: type[DraftModelProposer]) -> type[DraftModelProposer]:
    """Replacement for the V1 runner's `DraftModelProposer`: early exit where it is configured, vLLM's own elsewhere.

    A subclass, because the runner also uses the name in isinstance checks.
    """

    class DraftModelOrEarlyExit(original):
        def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> DraftModelProposer:
            early_exit = settings_of(vllm_config) is not None
            return object.__new__(EarlyExitProposer if early_exit else cls)

    class EarlyExitProposer(_EarlyExit, DraftModelOrEarlyExit):
        pass

    return DraftModelOrEarlyExit


@dataclass
class _Round:
    """Requests that are still drafting: row of the batch, token to run and its position, one entry a request."""

    rows: Tensor  # int64 [n]
    tokens: Tensor  # int32 [n]
    positions: Tensor  # int64 [n]
    room: int  # steps after which the first request may stand at the end of the model's context
    survival: Tensor | None = None  # float32 [n], the gate's statistic at the step before

    def keep(self, mask: Tensor) -> None:
        """Drop the requests whose gate is closed: they cost no further draft work."""
        self.rows, self.tokens, self.positions = self.rows[mask], self.tokens[mask], self.positions[mask]
        if self.survival is not None:
            self.survival = self.survival[mask]


class _EarlyExit(DraftModelProposer):
    """Overrides of vLLM's DraftModelProposer; the base class keeps the interface that the runner calls."""

    new_recorder = DraftRecorder

    def __init__(self, vllm_config: VllmConfig, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        if device.type != "cpu":
            raise SettingsError("early exit on CUDA needs vLLM's V2 model runner; unset VLLM_USE_V2_MODEL_RUNNER=0")
        settings = settings_of(vllm_config)
        assert settings is not None
        self.settings = settings
        self.gate = LiveGate(settings.gate, settings.threshold, settings.calibration)
        self.draft_length = settings.num_speculative_tokens  # may be lowered between two rounds, to 0 for no drafts
        self.counters = DraftCounters(settings.num_speculative_tokens)
        self.recorder: DraftRecorder | None = None  # only while a record is wanted
        self.runner = runner
        self._sampled: list[list[int]] = []
        self._verified: Sequence[int] | None = None
        self._draft_probs: Tensor | None = None
        self._groups: list[tuple[AttentionGroup, list[str]]] = []
        # Drafting follows the host's bookkeeping: that is where ragged proposals and the sampled tokens are.
        self.speculative_config.disable_padded_drafter_batch = True

    def _raise_if_padded_drafter_batch_disabled(self) -> None:
        """The base class cannot draft from an unpadded batch; this one always does."""

    # ---- loading ----------------------------------------------------------------------------------------------

    def load_model(self, target_model: nn.Module) -> None:
        """Takes the first E layers of the target as they are; loads nothing but the exit head."""
        layers = self.settings.layer
        self.model = first_layers(decoder_of(target_model), layers, self.vllm_config)
        self._layer_names = attention_names(self.model, self.vllm_config, layers)
        self.head = load_exit_head(self.settings, target_model, self.vllm_config)
        # Requests near max_model_len draft less (see `_start`); vLLM would switch drafting off for the whole batch.
        self.runner.effective_drafter_max_model_len = self.max_model_len + self.num_speculative_tokens
        self._last_useful = self.max_model_len - 1  # a token drafted from there would have no place in the model

    def initialize_attn_backend(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int] | None = None
    ) -> None:
        """Drafting uses the target's own attention groups, all of them: a hybrid model has several."""
        self._groups = []
        for groups in self.runner.attn_groups:
            for group in groups:
                names = [name for name in group.layer_names if name in self._layer_names]
                if names:
                    self._groups.append((group, names))
        self.kv_cache_gid = self._groups[0][0].kv_cache_group_id
        self.draft_attn_groups = [group for group, _ in self._groups]

    def dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Warm-up and profiling: compiles the trunk together with the target."""
        with set_forward_context(None, self.vllm_config, num_tokens=num_tokens):
            self.model(self.input_ids[:num_tokens], self.positions[:num_tokens], None)

    # ---- what the runner hands over -----------------------------------------------------------------------------

    def prepare_next_token_ids_cpu(self, sampled_token_ids: list[list[int]], *args: Any) -> Tensor:
        """Remembers which requests sampled anything; a request inside a chunked prefill has an empty list."""
        self._sampled, self._verified = sampled_token_ids, None
        return self._nothing

    def prepare_inputs(
        self, common_attn_metadata: CommonAttentionMetadata, sampled: Any, verified: Sequence[int], *args: Any
    ) -> tuple[CommonAttentionMetadata, Tensor]:
        """Remembers how many draft tokens of each request were verified; called only where there were any.

        The runner gathers hidden states for drafters that want them; this one wants none.
        """
        self._verified = verified
        return common_attn_metadata, self._nothing

    _nothing = torch.empty(0, dtype=torch.int64)

    def take_last_draft_probs(self) -> Tensor | None:
        """Draft distributions [requests, k, vocabulary] of the last round, for probabilistic drafts."""
        return self._draft_probs

    # ---- the round ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(
        self, num_speculative_tokens: int, *, sampling_metadata: SamplingMetadata, **unused: Any
    ) -> list[list[int]]:
        """Draft for every request that sampled a token in this step.

        Returns: one list of 0..k token ids a request, in batch order.
        """
        began = time.perf_counter()
        batch = self.runner.input_batch
        if self.recorder is not None:
            self.recorder.verdict(batch.req_ids, self._sampled, self._verified)
        proposals: list[list[int]] = [[] for _ in range(batch.num_reqs)]
        self._draft_probs = None
        limit = min(num_speculative_tokens, self.draft_length)
        state = self._start(batch, limit)
        if state is None:
            return proposals
        probabilistic = self._enable_probabilistic_draft_probs and not sampling_metadata.all_greedy
        probs: list[tuple[Tensor, Tensor]] = []
        for step in range(limit):
            logits, best, open_ = self._decide(state, batch.req_ids)  # before sampling, which scales logits in place
            if probabilistic:
                tokens, step_probs = self._sample(logits, state.rows, sampling_metadata)
                probs.append((state.rows, step_probs))
            else:
                tokens = self.head.to_full_ids(best)
            for row, token in zip(state.rows.tolist(), tokens.tolist(), strict=True):
                proposals[row].append(token)
            self.counters.step(len(state.rows))
            state.tokens, state.positions = tokens.int(), state.positions + 1
            if step + 1 == limit:
                break
            if not self._go_on(state, open_, step + 1):
                self.counters.ended_early()
                break
        if probabilistic:
            self._draft_probs = self._stack_probs(probs, batch.num_reqs, num_speculative_tokens)
        self.counters.seconds += time.perf_counter() - began
        return proposals

    def _go_on(self, state: _Round, open_: Tensor | None, steps: int) -> bool:
        """Drop the requests that draft no more after so many steps; whether any is left.

        Most steps close nothing: indexing every tensor of the round then costs as much as the gate itself.
        """
        useful = state.positions < self._last_useful if steps >= state.room else None
        if open_ is None and useful is None:
            return True
        going = useful if open_ is None else open_ if useful is None else open_ & useful
        assert going is not None
        left = int(going.sum())
        if 0 < left < len(going):
            state.keep(going)
        return left > 0

    def _decide(self, state: _Round, ids: Sequence[str]) -> tuple[Tensor, Tensor, Tensor | None]:
        """One draft step: logits [n, V], their argmax [n], and which requests' gates stay open, bool [n], None for all.

        Logits that are no numbers close the gate, `none` too, and are counted. They go on as zeros, so that the
        sampler sees a proper distribution and the verifier a token that it will hardly take.
        """
        logits = self.head.logits(self._forward(state))  # [n, V]
        best = logits.max(-1)  # NaN counts as the largest; so does +inf
        if self.recorder is not None:
            self.recorder.step([ids[row] for row in state.rows.tolist()], logits)
        if math.isfinite(best.values.sum().item()):
            return logits, best.indices, self.gate.decide(logits, state)
        bad = ~torch.isfinite(best.values)
        self.counters.nan_logits += int(bad.sum())
        logits = logits.masked_fill(bad.unsqueeze(1), 0.0)
        open_ = self.gate.decide(logits, state)
        return logits, logits.argmax(-1), ~bad if open_ is None else open_ & ~bad

    def _start(self, batch: Any, limit: int) -> _Round | None:
        """The round's first state: requests that sampled a token and have room for another."""
        rows = [row for row, sampled in enumerate(self._sampled) if sampled] if limit else []
        if not rows:
            return None
        index = torch.tensor(rows)
        last = torch.from_numpy(batch.num_tokens_no_spec)[index].long() - 1  # position of the token just sampled
        tokens = torch.from_numpy(batch.token_ids_cpu)[index, last].int()
        state = _Round(index, tokens, last, room=self._last_useful - int(last.max()))
        if state.room <= 0:
            state.keep(last < self._last_useful)
        if not len(state.rows):
            return None
        self.counters.round(len(state.rows))
        return state

    def _forward(self, state: _Round) -> Tensor:
        """One draft step: tokens [n] at positions [n] through E layers -> normed hidden states [n, hidden]."""
        metadata, slots = self._attention_metadata(state)
        with set_forward_context(metadata, self.vllm_config, num_tokens=len(state.rows), slot_mapping=slots):
            return self.model(state.tokens, state.positions, None)

    def _attention_metadata(self, state: _Round) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """One query token a request, attending to everything up to and including itself."""
        n = len(state.rows)
        seq_lens = (state.positions + 1).int()
        starts = self.arange[: n + 1]
        metadata: dict[str, Any] = {}
        slot_mappings: dict[str, Tensor] = {}
        for group, names in self._groups:
            table = self.runner.input_batch.block_table[group.kv_cache_group_id]
            blocks = table.get_device_tensor(self.runner.input_batch.num_reqs)[state.rows]  # [n, blocks]
            column = state.positions // table.block_size
            block = blocks.gather(1, column.unsqueeze(1)).squeeze(1).long()
            slots = block * table.block_size + state.positions % table.block_size
            common = CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=seq_lens,
                seq_lens_cpu_upper_bound=seq_lens,
                num_reqs=n,
                num_actual_tokens=n,
                max_query_len=1,
                max_seq_len=int(seq_lens.max()),
                block_table_tensor=blocks,
                slot_mapping=slots,
                positions=state.positions,
            )
            built = group.get_metadata_builder().build(0, common)
            for name in names:
                metadata[name], slot_mappings[name] = built, slots
        return metadata, slot_mappings

    # ---- probabilistic drafts -----------------------------------------------------------------------------------

    def _sample(self, logits: Tensor, rows: Tensor, sampling: SamplingMetadata) -> tuple[Tensor, Tensor]:
        """Draft tokens [n] drawn from the head's distribution at the request's temperature, and that distribution."""
        assert sampling.temperature is not None
        full = self.head.to_full_logits(logits)  # [n, vocabulary], -inf outside a draft vocabulary
        subset = replace(sampling, temperature=sampling.temperature[rows])
        return compute_probs_and_sample_next_token(full, subset, self.use_fp64_gumbel)

    def _stack_probs(self, probs: list[tuple[Tensor, Tensor]], requests: int, k: int) -> Tensor:
        """Ragged steps -> [requests, k, vocabulary]; the runner reads only the rows that were proposed."""
        stacked = torch.zeros(requests, k, probs[0][1].shape[-1])
        for step, (rows, step_probs) in enumerate(probs):
            stacked[rows, step] = step_probs
        return stacked
