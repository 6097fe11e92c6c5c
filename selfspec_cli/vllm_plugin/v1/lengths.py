"""How much each request of a round drafts, on vLLM's V1 model runner: by measured times and acceptance under gate
`auto` (rule.py), by the table of limits, and by the request's own wishes; whether another step is worth its time
(confidence.py); and what is copied from its own history (early_exit/free_drafts.py). Everything is on the host there,
so this is plain Python."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.early_exit import confidence
from selfspec_cli.early_exit.counters import DraftCounters
from selfspec_cli.early_exit.free_drafts import Matches
from selfspec_cli.early_exit.resolved import NOTHING, RequestSettings, ResolvedSettings, switched_off_by
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
    """Says before each round how much each request may draft, and hears what was accepted. layers: of the model."""

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
        looked at. Between two rounds the model drafts and verifies once, but for other requests or a prefill."""
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
        requests: all that the runner has, by name, each with `sampling_params`; others are forgotten."""
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


class StepWorth:
    """The probability that the draft of each request stands, and what was learnt of it from earlier drafts."""

    def __init__(self) -> None:
        self._counts = confidence.first_counts()
        self._stands: dict[int, float] = {}  # by row of the batch, in the round in hand
        self._drafted: dict[str, list[float]] = {}  # confidence of each token of the last draft, by request

    def verdict(self, names: Sequence[str], sampled: Sequence[Sequence[int]]) -> None:
        """A verify pass is over: how many tokens of the model's own drafts stood. A round begins."""
        values, stood = [], []
        for name, tokens in zip(names, sampled, strict=False):
            own = self._drafted.get(name, [])
            for place, value in enumerate(own[: len(tokens)]):  # the token after the last that stood was judged, too
                values.append(value)
                stood.append(place < len(tokens) - 1)
        if values:
            self._counts = confidence.learnt(self._counts, torch.tensor(values), torch.tensor(stood))
        self._stands, self._drafted = {}, {}

    def another_step(self, rows: Tensor, choice: Choice | None) -> bool:
        """Whether the requests in `rows` together may gain what another step is worth."""
        if choice is None:
            return True
        first = float(confidence.usual(self._counts))
        return sum(self._stands.get(row, first) for row in rows.tolist()) >= choice.step_value

    def step(self, names: Sequence[str], rows: Tensor, logits: Tensor) -> Tensor:
        """Take in a step's logits [n, V] for the requests in `rows`; whether the draft of each may still stand."""
        greatest = logits.float().softmax(-1).amax(-1).nan_to_num(0.0)
        rates = confidence.rates(self._counts)[confidence.bins_of(greatest)]
        first = float(confidence.usual(self._counts))
        for name, row, value, rate in zip(names, rows.tolist(), greatest.tolist(), rates.tolist(), strict=True):
            self._stands[row] = self._stands.get(row, first) * rate
            self._drafted.setdefault(name, []).append(value)
        return torch.tensor([self._stands[row] >= confidence.NEGLIGIBLE for row in rows.tolist()])


class FreeDrafts:
    """What the histories of an engine's requests say. text: the tokens [n] of the request in a row of the batch."""

    def __init__(self, settings: ResolvedSettings, counters: DraftCounters, text: Callable[[int], Tensor]) -> None:
        self._new = lambda: Matches(settings.free_drafts, settings.k)
        self._counters, self._text = counters, text
        self._matches: dict[str, tuple[Any, Matches]] = {}  # with the parameters of the request
        self._drafting: dict[int, tuple[Matches, Tensor, int]] = {}  # by row, with the text and the room of its draft

    def verdict(
        self, names: Sequence[str], sampled: Sequence[list[int]], verified: Sequence[int] | None
    ) -> tuple[list[list[int]], list[int] | None]:
        """As `DraftLengths.verdict`: the same without copied tokens, which say nothing of the model's own drafts."""
        kept, own = list(sampled), [0] * len(sampled) if verified is None else list(verified)
        for row, (name, tokens, places) in enumerate(zip(names, sampled, own.copy(), strict=False)):
            if name not in self._matches or not tokens:
                continue
            _, matches = self._matches[name]
            matches.drafted = own[row] = min(matches.drafted, places)  # the scheduler may have cut a draft short
            matches.copied = min(matches.copied, places - own[row])
            kept[row] = tokens[: own[row] + 1]
            self._counters.free_accepted += matches.verdict(self._text(row), len(tokens) - 1)
        return kept, None if verified is None else own

    def begin(
        self,
        requests: Mapping[str, Any],
        names: Sequence[str],
        rows: Sequence[int],
        rooms: Sequence[int],
        lengths: Sequence[int],
        cost: float,
    ) -> None:
        """A round begins for requests in `rows` of the batch. rooms: most tokens of the draft of each; lengths: most of
        the model's own; cost: of a draft step, in plain steps, for each of the requests."""
        if len(self._matches) > 2 * len(requests) + 16:
            for name in self._matches.keys() - requests.keys():
                del self._matches[name]
        self._drafting = {}
        for name, row, room, k in zip(names, rows, rooms, lengths, strict=True):
            parameters = requests[name].sampling_params
            read_from, matches = self._matches.get(name, (None, None))
            if matches is None or read_from is not parameters:  # a new request, also under an old name
                matches = self._new()
                self._matches[name] = parameters, matches
            text = self._text(row)
            matches.look_up(text, cost, room, k)
            self._drafting[row] = matches, text, room

    def copy(self, row: int, draft: list[int]) -> bool:
        """Add the rest of a trusted match to the draft of a row; whether there was one, which ends the draft."""
        matches, text, room = self._drafting[row]
        matches.drafted = len(draft)
        rest = matches.rest(text, draft, room)
        matches.copied = len(rest)
        self._counters.free_drafted += len(rest)
        draft.extend(rest)
        return bool(rest)
