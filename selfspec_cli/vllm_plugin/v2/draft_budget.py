"""The draft budget of each request, on the device: how much it may draft in a round, by the table of lengths by load,
by what the request itself asked for, by its acceptance so far, and by where it ends. round_setup.py writes it when a
request arrives, and reads it when a round begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec_cli.early_exit.acceptance import Ladder
from selfspec_cli.early_exit.length_table import LARGEST, LengthTable


@dataclass(frozen=True)
class Ending:
    """Where a request ends: at `length` tokens, its prompt counted in, and behind the token `stop` (-1: none).

    vLLM's scheduler begins a step before it has seen the tokens of the last one, so it also runs one for a request that
    has just ended. On the device the end is known at once, and nothing has to be drafted in vain while others wait.
    """

    length: int = LARGEST
    stop: int = -1

    @classmethod
    def of(cls, parameters: Any, prompt: int) -> Ending:
        """From a request's SamplingParams (None: nothing is known) and the length of its prompt. Other tokens than the
        model's own end of text may end a request too; those are left to vLLM."""
        most = None if parameters is None else parameters.max_tokens
        stop = None if parameters is None else parameters.eos_token_id  # None where it is to be ignored
        return cls(LARGEST if most is None else min(prompt + most, LARGEST), -1 if stop is None else stop)


class Limits(NamedTuple):
    """What bounds a draft beside acceptance, on the device, as kernels take it.

    cells: int32 [cells, 3], requests, context and length of each entry of the table in its order. cell_limits: float32
    [cells], what the gate compares with there, NaN for the gate's own. own_lengths, own_limits: int32 and float32
    [requests], what each request asked for (LARGEST and NaN: nothing). ends, stops: int32 [requests], `Ending` of each.
    """

    cells: Tensor
    cell_limits: Tensor
    own_lengths: Tensor
    own_limits: Tensor
    ends: Tensor
    stops: Tensor


class Acceptance(NamedTuple):
    """Estimates of acceptance and the ladder that they choose from, on the device, as kernels take them.

    ladder: int32 [levels], empty where acceptance does not count. rises, falls: float32 [levels]. rates, levels:
    float32 and int32 [requests], of each request the estimated acceptance and level (1 is the first; whether anything
    is drafted at all is decided for the whole batch, by widths.py). usual: float32 [1], of a new request.
    """

    ladder: Tensor
    rises: Tensor
    falls: Tensor
    rates: Tensor
    levels: Tensor
    usual: Tensor


@dataclass
class DraftBudget:
    """arrivals: int32 [requests, 5], of new requests: slot, length and token that end it, its own draft length and
    limit."""

    limits: Limits
    acceptance: Acceptance
    arrivals: Tensor

    @classmethod
    def of(
        cls, table: LengthTable, ladder: Ladder | None, requests: int, device: torch.device | None = None
    ) -> DraftBudget:
        """For a table, and a ladder where acceptance counts; requests: slots for them. No gate has limits here yet."""

        def floats(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        def integers(values: Sequence[object]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        limits = Limits(
            cells=integers(_cells(table)),
            cell_limits=floats([math.nan] * len(table.cells)),
            own_lengths=integers([LARGEST] * requests),
            own_limits=floats([math.nan] * requests),
            ends=integers([LARGEST] * requests),
            stops=integers([-1] * requests),
        )
        acceptance = Acceptance(
            ladder=integers(ladder.lengths if ladder else ()),
            rises=floats(ladder.rises if ladder else ()),
            falls=floats(ladder.falls if ladder else ()),
            rates=floats([1.0] * requests),
            levels=integers([max(len(ladder.lengths) if ladder else 1, 1)] * requests),
            usual=floats([1.0]),
        )
        return cls(limits, acceptance, integers([[0] * 5] * requests))

    def set_table(self, table: LengthTable) -> None:
        """Another table from the next round on, without thresholds: no graph holds the old one's place."""
        self.limits = self.limits._replace(
            cells=self.upload(_cells(table), torch.int32),
            cell_limits=self.upload([math.nan] * len(table.cells), torch.float32),
        )

    def staged(self, values: Sequence[float] | Sequence[tuple[int, ...]], dtype: torch.dtype) -> Tensor:
        """Numbers of the host where a copy to the device begins without waiting for it."""
        return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=self.arrivals.is_cuda)

    def upload(self, values: Sequence[float] | Sequence[tuple[int, ...]], dtype: torch.dtype) -> Tensor:
        """Numbers of the host on the device, without waiting for the device."""
        return self.staged(values, dtype).to(self.arrivals.device, non_blocking=True)


def _cells(table: LengthTable) -> list[tuple[int, int, int]]:
    return [(cell.requests, cell.context, cell.k) for cell in table.cells]
