"""The record of real drafting: for each drafted token every gate statistic, and whether the verifier took it.

A recorder is called after each draft step and each verification. What a gate would have done is then a question to the
log (`replay.py`), not to the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.early_exit.errors import SettingsError, closest
from selfspec_cli.early_exit.gates import GATES, Gate, features
from selfspec_cli.early_exit.gates.base import Distribution


@dataclass(frozen=True)
class DraftLog:
    """Verified rounds of single requests, in the order of their verdicts.
    statistics: float32 [rounds, k, len(features)], NaN beyond what was drafted. drafted: int64 [rounds], tokens that
    the verifier saw, 1..k. accepted: int64 [rounds], how many of them it took, 0..drafted. request: int64 [rounds],
    numbers requests from 0. features: names of the statistics, in their order (on CUDA, only those that it computes).
    """

    statistics: Tensor
    drafted: Tensor
    accepted: Tensor
    request: Tensor
    features: tuple[str, ...]

    @property
    def k(self) -> int:
        return int(self.statistics.shape[1])

    @property
    def was_drafted(self) -> Tensor:
        """Places of the table that hold a drafted token, bool [rounds, k]."""
        return torch.arange(self.k) < self.drafted.unsqueeze(1)

    @property
    def was_accepted(self) -> Tensor:
        """Tokens that the verifier took: they and all before them in the round were right, bool [rounds, k]."""
        return torch.arange(self.k) < self.accepted.unsqueeze(1)

    @property
    def was_at_stake(self) -> Tensor:
        """Drafted tokens whose predecessors were all accepted, bool [rounds, k]."""
        return self.was_drafted & (torch.arange(self.k) <= self.accepted.unsqueeze(1))

    def feature(self, name: str) -> Tensor:
        """One statistic, float32 [rounds, k]. Raises SettingsError for one that was not logged."""
        if name not in self.features:
            raise SettingsError(closest(name, self.features, "logged statistic"))
        return self.statistics[:, :, self.features.index(name)]

    def choose(self, rounds: Tensor) -> DraftLog:
        """The log of some rounds: bool or indices [rounds]."""
        columns = ("statistics", "drafted", "accepted", "request")
        return replace(self, **{name: getattr(self, name)[rounds] for name in columns})

    def halves(self) -> tuple[DraftLog, DraftLog]:
        """Split the rounds into two halves, by every other request: one to fit on, one to judge on."""
        even = self.request % 2 == 0
        return self.choose(even), self.choose(~even)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Sequence[Any]], k: int) -> DraftLog:
        """From `DraftRecorder.plain`: columns by name, `statistics` one list of tokens a round."""
        rounds, names = len(plain["drafted"]), tuple(plain["features"])
        statistics = torch.full((rounds, k, len(names)), torch.nan)
        for number, tokens in enumerate(plain["statistics"]):
            statistics[number, : len(tokens)] = torch.tensor(tokens, dtype=torch.float32)
        drafted, accepted, request = (
            torch.tensor(plain[name], dtype=torch.int64) for name in ("drafted", "accepted", "request")
        )
        return cls(statistics, drafted, accepted, request, names)


@dataclass
class DraftRecorder:
    """Collects a `DraftLog` beside a draft loop. A draft waits under its request's id until the verifier has spoken.
    A step only copies the logits; statistics of one token at a time would cost a tenth of a small model's speed."""

    BLOCK = 64  # tokens; at a vocabulary of 128,256 their logits are 33 MB

    features: tuple[str, ...] = field(default_factory=features)
    _rounds: list[tuple[list[int], int, int]] = field(default_factory=list)  # tokens by number, accepted, request
    _waiting: dict[str, list[int]] = field(default_factory=dict)
    _requests: dict[str, int] = field(default_factory=dict)
    _tokens: int = 0  # seen
    _statistics: list[Tensor] = field(default_factory=list)  # of the tokens seen but for those of `_steps`
    _steps: list[tuple[list[str], list[bool], Tensor]] = field(default_factory=list)  # ids, which begin, logits [n, V]
    _last: dict[tuple[str, str], float] = field(default_factory=dict)  # gate, request -> its cumulative statistic

    def step(self, ids: Sequence[str], logits: Tensor) -> None:
        """One draft step over requests `ids`: logits [n, V] before any sampling."""
        self._steps.append((list(ids), [name not in self._waiting for name in ids], logits.clone()))
        for name in ids:
            self._waiting.setdefault(name, []).append(self._tokens)
            self._tokens += 1
        if sum(len(ids) for ids, *_ in self._steps) >= self.BLOCK:
            self._reduce()

    def verdict(self, ids: Sequence[str], sampled: Sequence[Sequence[int]], verified: Sequence[int] | None) -> None:
        """The verify pass is over. ids: the batch. sampled: tokens that each request gained, one of them the verifier's
        own; empty inside a prefill. verified: draft tokens of each that the pass looked at; None if it looked at
        none."""
        for place, name in enumerate(ids):
            draft = self._waiting.pop(name, None)
            seen = int(verified[place]) if verified is not None else 0
            if draft and seen and sampled[place]:
                tokens = draft[:seen]  # the scheduler may have cut a draft short
                number = self._requests.setdefault(name, len(self._requests))
                self._rounds.append((tokens, min(len(sampled[place]) - 1, len(tokens)), number))

    def plain(self) -> dict[str, list[Any]]:
        """The log so far in plain values, for another process."""
        self._reduce()
        table = torch.cat(self._statistics) if self._statistics else torch.empty(0, len(self.features))
        return {
            "features": list(self.features),
            "statistics": [table[tokens].tolist() for tokens, _, _ in self._rounds],
            "drafted": [len(tokens) for tokens, _, _ in self._rounds],
            "accepted": [accepted for _, accepted, _ in self._rounds],
            "request": [request for _, _, request in self._rounds],
        }

    def _reduce(self) -> None:
        if self._steps:
            draft = Distribution(torch.cat([logits for *_, logits in self._steps]))
            columns = [self._column(GATES[name], draft) for name in self.features]
            self._statistics.append(torch.stack(columns, dim=-1).cpu())
        self._steps = []

    def _column(self, gate: Gate, draft: Distribution) -> Tensor:
        """The gate's statistic of every token of `_steps`, float32 [tokens]."""
        assert gate.statistic is not None
        if not gate.cumulative:
            return gate.statistic(draft, 1.0)
        values: list[Tensor] = []
        for ids, begins, logits in self._steps:
            before = [1.0 if new else self._last[gate.name, name] for name, new in zip(ids, begins, strict=True)]
            values.append(gate.statistic(Distribution(logits), torch.tensor(before, device=logits.device)))
            self._last |= zip([(gate.name, name) for name in ids], values[-1].tolist(), strict=True)
        return torch.cat(values)
