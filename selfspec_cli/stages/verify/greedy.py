"""Greedy cases on one engine, and what a first difference between two engines' outputs is worth.

Greedy decoding has one right answer but for rounding: where the model holds two tokens almost equally likely, vLLM
itself chooses by how tokens are batched. So at the first difference the plain engine is asked how likely it holds both
tokens there, alone in its batch, and once more when the tokens come k + 1 at a time, as a verify pass brings them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from typing import Any

from selfspec_cli.early_exit.counters import VerifyCounts
from selfspec_cli.engine import requests as asking
from selfspec_cli.engine.live import Engine
from selfspec_cli.engine.requests import Answer, Request
from selfspec_cli.stages.verify.cases import Case

TOLERANCE = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.25}
"""Gap (nats) up to which two tokens count as level, by the dtype of the weights: two units in the last place of logits
between 16 and 32; in float32, where rounding is far below, a bound on what different orders of summation do."""

PREEMPTED_AT = (5, 12, 30, 70)


@dataclass(frozen=True)
class Observed:
    """What one engine did in one case. preempted, cached: requests thrown out, tokens found in the prefix cache."""

    answers: list[Answer]
    counts: VerifyCounts | None
    preempted: int
    cached: int
    seconds: float


@dataclass
class Difference:
    """The first place where a request's output is not the plain engine's. gap: by how much (nats) the plain engine,
    asked for this prefix alone, prefers its own token; gap_together: the same when tokens come k + 1 at a time. None:
    not asked."""

    request: int
    place: int
    ours: int | None
    plain: int | None
    gap: float | None = None
    gap_together: float | None = None
    kind: str = "fault"
    prefix: list[int] = field(default_factory=list, repr=False)

    def nearly_level(self, tolerance: float) -> bool:
        """Whether the gap is near enough to 0 for the plain engine to turn to ours when the tokens come together."""
        return self.gap is not None and abs(self.gap) <= 4 * tolerance

    def judge(self, tolerance: float) -> None:
        """A near-tie: the two are level for the plain engine, or it turns to ours when the tokens come together."""
        level = self.gap is not None and abs(self.gap) <= tolerance
        turns = self.gap_together is not None and self.gap_together <= 0
        self.kind = "near-tie" if level or (turns and self.nearly_level(tolerance)) else "fault"

    @property
    def turned(self) -> bool:
        """Whether the plain engine itself, asked for this prefix another way, chooses the arm's token. Kernels that are
        batch-invariant never do that."""
        return any(gap is not None and gap < 0 for gap in (self.gap, self.gap_together))

    def to_dict(self) -> dict[str, Any]:
        """For the document, with the choices in words."""
        values = {name: value for name, value in asdict(self).items() if name != "prefix"}
        for name, value in (("alone", self.gap), ("together", self.gap_together)):
            values[f"chosen_{name}"] = None if value is None else "ours" if value < 0 else "plain"
        return values


def perform(engine: Engine, case: Case, drafting: bool) -> Observed:
    """Run a case. drafting: on the arm, whose gate and draft length may change; else on the plain engine."""
    if case.fresh:
        asking.forget_prefixes(engine)
    if drafting and case.gates:
        engine.set_gate(*case.gates[0])
    before, start = _state(engine), time.perf_counter()
    between = _between(engine, case, drafting)
    found = asking.answers(engine, case.requests, batch=case.batch, waves=case.waves, between=between)
    seconds, after = time.perf_counter() - start, _state(engine)
    counts = None if after[0] is None or before[0] is None else after[0].since(before[0])
    return Observed(found, counts, after[1] - before[1], after[2] - before[2], round(seconds, 2))


def _state(engine: Engine) -> tuple[VerifyCounts | None, int, int]:
    return engine.verify_counts(), asking.metric(engine, "num_preemptions"), asking.metric(engine, "prefix_cache_hits")


def _between(engine: Engine, case: Case, drafting: bool) -> Callable[[int], None] | None:
    gates, lengths = cycle(case.gates), cycle(range(int(engine.cfg.k or 0), -1, -1))

    def preempt(step: int) -> None:
        if step in PREEMPTED_AT:
            asking.preempt_all(engine)

    def change(step: int) -> None:
        engine.set_gate(*next(gates))
        engine.set_draft_length(next(lengths))

    if case.meanwhile == "change":
        return change if drafting else None
    return preempt if case.meanwhile == "preempt" else None


def differences(case: Sequence[Request], ours: Sequence[Answer], plain: Sequence[Answer]) -> list[Difference]:
    """The first difference of each greedy request that has one, not judged yet."""
    found = []
    for number, (request, got, want) in enumerate(zip(case, ours, plain, strict=True)):
        if not request.greedy or (got.tokens == want.tokens and got.ended == want.ended):
            continue
        place = parting(got.tokens, want.tokens)
        mine, other = (one.tokens[place] if place < len(one.tokens) else None for one in (got, want))
        prefix = [*request.prompt, *want.tokens[:place]]
        found.append(Difference(number, place, mine, other, prefix=prefix))
    return found


def parting(ours: Sequence[int], plain: Sequence[int]) -> int:
    """The first place where two outputs differ; the shorter one's length if one begins like the other."""
    unequal = (at for at, (one, other) in enumerate(zip(ours, plain, strict=False)) if one != other)
    return next(unequal, min(len(ours), len(plain)))


def ask(engine: Engine, differences: Sequence[Difference], tolerance: float) -> None:
    """Ask the plain engine for the gap at the first differences, and judge them; what is not asked stays a fault."""
    for difference in differences[:16]:
        difference.gap = _gap(engine, difference, room=2)
        difference.judge(tolerance)


def ask_together(engine: Engine, differences: Sequence[Difference], chunk: int, tolerance: float) -> None:
    """The same of an engine that takes `chunk` tokens a step. The chunk that holds the last token of the prefix, whose
    logits decide, is filled up with what follows."""
    for difference in differences:
        missing = -len(difference.prefix) % chunk
        difference.gap_together = _gap(engine, difference, room=chunk + 1, after=max(missing - 1, 0))
        difference.judge(tolerance)


def _gap(engine: Engine, difference: Difference, room: int, after: int = 0) -> float | None:
    """By how much (nats) an engine prefers the plain engine's token to the arm's; None where one of the outputs only
    ends, or the model has no `room` for more tokens. after: tokens that follow the one that is asked for."""
    tokens = (difference.plain, difference.ours)
    if None in tokens or len(difference.prefix) + room > engine.max_model_len:
        return None
    plain, ours = (
        asking.log_probability(engine, difference.prefix, token, [token] * after)
        for token in tokens
        if token is not None
    )
    return round(plain - ours, 5)


def unlike_together(engine: Engine, requests: Sequence[Request], plain: Sequence[Answer]) -> dict[str, int]:
    """How many outputs of the plain engine (differ, of compared) another plain one, that takes fewer tokens a step,
    would not choose: at some place another token is likelier. Twelve are looked at, and none whose choice is bound by
    stop tokens or a grammar."""
    compared, differ = 0, 0
    for request, answer in zip(requests, plain, strict=True):
        fits = len(request.prompt) + len(answer.tokens) < engine.max_model_len
        if not answer.tokens or not fits or not set(request.params) <= {"logprobs"} or compared == 12:
            continue
        compared += 1
        differ += asking.preferred(engine, request.prompt, answer.tokens) > 0
    return {"compared": compared, "differ": differ}


def unlike_scores(case: Sequence[Request], ours: Sequence[Answer], plain: Sequence[Answer], tolerance: float) -> int:
    """Requests whose log-probabilities (of equal tokens) are not the plain engine's."""
    wrong = 0
    for request, got, want in zip(case, ours, plain, strict=True):
        if request.greedy and got.scores is not None and want.scores is not None:
            same = parting(got.tokens, want.tokens)
            pairs = zip(got.scores[:same], want.scores[:same], strict=True)
            wrong += any(abs(one - other) > tolerance for one, other in pairs)
    return wrong
