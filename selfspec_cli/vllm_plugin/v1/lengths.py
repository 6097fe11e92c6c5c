"""How much each request of a round drafts, on vLLM's V1 model runner: by measured times and acceptance under gate
`auto` (rule.py), by the table of limits, and by the request's own wishes. Everything is on the host there, so this is
plain Python."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec_cli.early_exit.request_settings import NOTHING, RequestSettings, switched_off_by
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.early_exit.rule import WIDTHS, Choice, LengthRule, StepTimes
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
    """Says before each round how much each request may draft, and hears after it what was accepted. layers: of the
    model."""

    def __init__(self, settings: ResolvedSettings, layers: int) -> None:
        self.table, self._settings = settings.table, settings
        self.chooses_width = settings.chooses_width  # by measured times; the gate of a live engine may say otherwise
        self._own: dict[str, tuple[Any, RequestSettings]] = {}  # with the parameters that they were read from
        widths = (settings.width, *(width for width in WIDTHS if width < settings.width))
        times = StepTimes.assumed(settings.assumed_draft_step(layers))
        self.rule = LengthRule(times, widths) if settings.measures else None
        self.choice: Choice | None = None  # of the round in hand
        self._began: tuple[float, frozenset[str]] | None = None  # when the last round did, and its requests

    def verdict(self, names: Sequence[str], sampled: Sequence[Sequence[int]], verified: Sequence[int] | None) -> None:
        """A verify pass is over, and a round begins. sampled: tokens of each request; verified: drafts of each that it
        looked at.

        From the beginning of one round to the next one's, the model drafts and verifies once. Where other requests came
        in between, or a prefill, that says nothing.
        """
        if self.rule is None:
            return
        now, running = time.perf_counter(), frozenset(names)
        last, self._began = self._began, (now, running)
        if self.choice is None or last is None or last[1] != running or not all(sampled):
            return
        width = self.choice.width
        accepted = sum(len(tokens) - 1 for tokens in sampled) / len(running)
        self.rule.stepped(len(running), width, now - last[0], accepted=accepted)
        if width and verified is not None:
            self._judge(sampled, verified, width)

    def _judge(self, sampled: Sequence[Sequence[int]], verified: Sequence[int], width: int) -> None:
        assert self.rule is not None
        judged, stood = [0] * self.rule.acceptance.k, [0] * self.rule.acceptance.k
        for tokens, drafted in zip(sampled, verified, strict=False):
            for place in range(min(drafted, len(tokens))):
                judged[place] += 1
                stood[place] += place < len(tokens) - 1
        self.rule.judged(judged, stood)
        self.rule.brought(len(sampled), width, sum(stood) / len(sampled))

    def budgets(
        self, requests: Mapping[str, Any], load: int, names: Sequence[str], contexts: Sequence[int]
    ) -> list[RequestBudget]:
        """For each of the requests `names`, of a batch of `load`. contexts: tokens of each whose keys are known.

        requests: all that the runner has, by name, each with `sampling_params`; others are forgotten.
        """
        if len(self._own) > 2 * len(requests) + 16:
            for name in self._own.keys() - requests.keys():
                self._own.pop(name)
        most = self._settings.width
        if self.rule is not None and names:
            self.choice = self.rule.choose(load, float(sum(contexts)))
            most = self.choice.width if self.chooses_width else most
        running = zip(names, contexts, strict=True)
        return [self._budget(name, requests, load, context, most) for name, context in running]

    def _budget(self, name: str, requests: Mapping[str, Any], load: int, context: int, most: int) -> RequestBudget:
        cell = self.table.at(load, context)
        parameters = requests[name].sampling_params
        read_from, own = self._own.get(name, (None, NOTHING))
        if read_from is not parameters:  # a new request, also under an old name
            own = own_settings(parameters, self._settings)
            self._own[name] = parameters, own
        k = cell.k if own.k is None else min(cell.k, own.k)
        free = min(self._settings.free_drafts, most)
        bound = own.k if k and load <= self._settings.free_requests else k
        room = free if bound is None or bound >= self._settings.k else min(bound, free)
        k = min(k, most)
        off = None if k else switched_off_by(cell, own) or "cost"
        return RequestBudget(k, own.threshold, off, room)
