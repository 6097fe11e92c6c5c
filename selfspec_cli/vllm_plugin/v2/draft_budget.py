"""The draft budget of each request, on the device: how much it may draft in a round, by the table of limits by load, by
what the request itself asked for, and by where it ends. round_setup.py writes it when a request arrives, and reads it
when a round begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selfspec_cli.early_exit.length_table import LARGEST, LengthTable


@dataclass(frozen=True)
class Ending:
    """Where a request ends: at `length` tokens, its prompt counted in, and after the token `stop` (-1: none).

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
    """The limits of each draft, on the device, as kernels take them.

    cells: int32 [cells, 3], requests, context and length of each entry of the table in its order. own_lengths,
    own_limits: int32 and float32 [requests], what each request asked for (LARGEST and NaN: nothing). ends, stops: int32
    [requests], `Ending` of each.
    """

    cells: Tensor
    own_lengths: Tensor
    own_limits: Tensor
    ends: Tensor
    stops: Tensor


@dataclass
class DraftBudget:
    """arrivals: int32 [requests, 5], of new requests: slot, length and token that end it, its own draft length and
    limit."""

    limits: Limits
    arrivals: Tensor

    @classmethod
    def of(cls, table: LengthTable, requests: int, device: torch.device | None = None) -> DraftBudget:
        """For a table, and `requests` slots of requests."""

        def integers(values: Sequence[object]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        limits = Limits(
            cells=integers(_cells(table)),
            own_lengths=integers([LARGEST] * requests),
            own_limits=torch.full((requests,), math.nan, device=device),
            ends=integers([LARGEST] * requests),
            stops=integers([-1] * requests),
        )
        return cls(limits, integers([[0] * 5] * requests))

    def set_table(self, table: LengthTable) -> None:
        """Another table from the next round on: no graph holds the old one's place."""
        self.limits = self.limits._replace(cells=self.upload(_cells(table), torch.int32))

    def staged(self, values: Sequence[float] | Sequence[tuple[int, ...]], dtype: torch.dtype) -> Tensor:
        """Numbers of the host where a copy to the device begins without waiting for it."""
        return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=self.arrivals.is_cuda)

    def upload(self, values: Sequence[float] | Sequence[tuple[int, ...]], dtype: torch.dtype) -> Tensor:
        """Numbers of the host on the device, without waiting for the device."""
        return self.staged(values, dtype).to(self.arrivals.device, non_blocking=True)


def _cells(table: LengthTable) -> list[tuple[int, int, int]]:
    return [(cell.requests, cell.context, cell.k) for cell in table.cells]
