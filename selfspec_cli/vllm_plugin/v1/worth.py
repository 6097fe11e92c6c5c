"""Whether another draft step is worth its time, on vLLM's V1 model runner, by the estimate of confidence.py."""

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec_cli.early_exit import confidence
from selfspec_cli.early_exit.rule import Choice


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
