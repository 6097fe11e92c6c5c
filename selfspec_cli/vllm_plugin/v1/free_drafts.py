"""Free drafts on vLLM's V1 model runner: which requests are drafted for by their own history. The rule is in
early_exit/free_drafts.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from selfspec_cli.early_exit.counters import DraftCounters
from selfspec_cli.early_exit.free_drafts import Matches
from selfspec_cli.early_exit.resolved import ResolvedSettings


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
        """A verify pass is over, as in `DraftLengths.verdict`: the same without the tokens that were copied, which say
        nothing of the model's own drafts."""
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
