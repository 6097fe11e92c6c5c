"""How long each request of a round is drafted for, on vLLM's V1 model runner: the table by load, the request's own
wishes, and its acceptance so far. Everything is on the host there, so this is plain Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec_cli.early_exit.acceptance import USUAL_WEIGHT, RequestEstimate
from selfspec_cli.early_exit.bandit import Arm, Bandit, arms
from selfspec_cli.early_exit.estimate import trials, updated
from selfspec_cli.early_exit.request_settings import NOTHING, RequestSettings, switched_off_by
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.vllm_plugin.requests import own_settings


@dataclass(frozen=True)
class RequestBudget:
    """What a request may draft in a round. k: tokens; threshold: of the gate, None for the gate's own; off: why it
    drafts nothing (one of `counters.REASONS`), None where it drafts; room: most tokens, free ones included."""

    k: int
    threshold: float | None
    off: str | None = None
    room: int = 0


class DraftLengths:
    """Says before each round how much each request may draft, and hears after it what was accepted."""

    def __init__(self, settings: ResolvedSettings) -> None:
        self.table = settings.table
        self._settings, self._ladder = settings, settings.ladder
        self._own: dict[str, tuple[Any, RequestSettings]] = {}  # with the parameters that they were read from
        self._estimates: dict[str, RequestEstimate] = {}
        self._usual = 1.0  # the acceptance with which a request begins
        self._bandit: Bandit | None = None
        if settings.bandit:
            assert settings.draft_cost is not None
            self._bandit = Bandit(arms(settings.gate.kind, settings.threshold, settings.k), settings.draft_cost)
        self._arm: Arm | None = None  # of the round in hand

    def verdict(self, names: Sequence[str], sampled: Sequence[Sequence[int]], verified: Sequence[int] | None) -> None:
        """A verify pass is over. sampled: tokens of each request; verified: drafts of each that it looked at."""
        if self._bandit is not None and self._arm is not None:
            self._tell(self._bandit, self._arm, sampled, verified or ())
            self._arm = None
        if self._ladder is None or verified is None:
            return
        for name, tokens, drafted in zip(names, sampled, verified, strict=False):
            if drafted and tokens:
                judged = trials(len(tokens) - 1, drafted)
                self._usual = updated(self._usual, len(tokens) - 1, judged, USUAL_WEIGHT)
                if name in self._estimates:
                    self._estimates[name].verdict(len(tokens) - 1, drafted)

    @staticmethod
    def _tell(bandit: Bandit, arm: Arm, sampled: Sequence[Sequence[int]], verified: Sequence[int]) -> None:
        """What the round of an arm yielded the requests that were drafted for; without drafts, only that it is over."""
        pairs = zip(sampled, verified, strict=False)
        rounds = [(len(tokens) - 1, steps) for tokens, steps in pairs if tokens and steps]
        if rounds or not arm.k:
            bandit.learn(arm, rounds)

    def budgets(
        self, requests: Mapping[str, Any], load: int, names: Sequence[str], contexts: Sequence[int]
    ) -> list[RequestBudget]:
        """For each of the requests `names`, of a batch of `load`. contexts: tokens of each whose keys are known.

        requests: all that the runner has, by name, each with `sampling_params`; others are forgotten.
        """
        if len(self._own) > 2 * len(requests) + 16:
            for name in self._own.keys() - requests.keys():
                self._own.pop(name)
                self._estimates.pop(name, None)
        self._arm = None if self._bandit is None or not names else self._bandit.choose()
        return [self._budget(name, requests, load, context) for name, context in zip(names, contexts, strict=True)]

    def _budget(self, name: str, requests: Mapping[str, Any], load: int, context: int) -> RequestBudget:
        cell = self.table.at(load, context)
        parameters = requests[name].sampling_params
        read_from, own = self._own.get(name, (None, NOTHING))
        if read_from is not parameters:  # a new request, also under an old name
            own = own_settings(parameters, self._settings)
            self._own[name] = parameters, own
            self._estimates.pop(name, None)
        k = cell.k if own.k is None else min(cell.k, own.k)
        free = self._settings.free_drafts
        bound = own.k if k and load <= self._settings.free_requests else k
        room = free if bound is None or bound >= self._settings.k else min(bound, free)
        if k and self._ladder is not None:
            if name not in self._estimates:
                # A seed gives the same sample again, whatever other requests had accepted before.
                first = self._usual if parameters.seed is None else 1.0
                self._estimates[name] = RequestEstimate.beginning(self._ladder, first)
            k = min(k, self._estimates[name].length())
        threshold = cell.threshold if own.threshold is None else own.threshold
        if self._arm is not None:
            k, threshold = min(k, self._arm.k), self._arm.threshold if threshold is None else threshold
        off = None if k else switched_off_by(cell, own) or "acceptance"
        return RequestBudget(k, threshold, off, room)
