"""The rule that chooses how much to draft: the most expected tokens a second, from measured times. No torch.

A speculation step of width w verifies w draft slots of each of n requests and then drafts for the next step. It takes
T(n, w) seconds and brings each request 1 + s_1 + ... + s_w tokens, where s_j is the probability that the first j drafts
of a request all stand. Before a step the rule takes the width, 0 included, with the greatest n (1 + sum s) / T.

Both sides are estimates: T by number of requests, context and width, s by position. A step that also computes prompts
is another kind of step, with times of its own: its graphs differ, and on a busy server most steps are of that kind. The
time of the prompts' tokens themselves is left out, because an answer has the same prompt at any width.

Most choices compare the means, and hold for a few steps. While drafts are the best, every fourth compares values that
are drawn from the estimates (W. R. Thompson, "On the likelihood that one unknown probability exceeds another",
Biometrika 1933). Old observations count less, so widths that may have become better are tried again, seldom, and one
that is far behind hardly ever. Nothing may be slower than plain steps, so they are seen first at each batch size, and
tried again while drafts are the best. While they are the best, drafts are tried. Both trials may lose a small share of
the time.

Inside a step the device makes another draft step while the tokens that it is expected to bring are worth its time at
the engine's speed: the marginal value theorem. `Choice.step_value` is that number of tokens. The speed is the one that
steps reached: drafts that end by a reached speed bring a greater one, and so on to the greatest (W. Dinkelbach, "On
nonlinear fractional programming", 1967), while by an expected one that is too great nothing is drafted at all. The
first draft step is always made where no request copies its draft from the text, because without drafts there are no
verdicts.
"""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

WIDTHS = (12, 8, 6, 4, 3, 2, 0)
"""Widths that the rule chooses from."""
REQUESTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes with times of their own; a batch counts as the next of these. Decode graphs are captured for them."""
LARGEST_VERIFY = 768
"""Tokens of a verify pass beyond which drafts are not tried, and no decode graph is captured."""
SHORT_CONTEXT = 8192
"""Tokens of context of a whole batch below which attention takes no time of its own; beyond, each doubling does."""

WORTH_LEAVING_OUT = 0.3
"""Draft steps that reading a part of the context must take for drafts to leave it out. Blocks of greatest attention
lose 12 to 16 % of a step's tokens (results/LOG.md), and draft steps that take 0.2 to 0.3 longer lose as much."""

HELD, PLAIN_HELD, LEAST_HELD = 4, 16, 2
"""Steps that a choice holds for, so that choosing costs nothing: usually, for plain steps while they are the best, and
for a width that was never seen while drafts are. The last two plain steps before drafts, and the last two with drafts
before plain steps, say nothing of their time (see `LengthRule.stepped`), so trials hold as long as other choices."""
PLAUSIBLE, UNSEEN_SHARE = 0.85, 0.01
"""A width that was never seen at a batch size is tried if it is predicted to reach this share of the best. Such trials
may lose UNSEEN_SHARE of all time: steps of many drafts are long on a large model."""
TRIED_EVERY = 4
"""One choice in this number is drawn; the others take the best by the means."""
SPREAD = 0.15
"""Relative standard deviation of a step's predicted time; a single observation deviates about as much."""
PAUSE, RESUMED = 1.0, 0.2
"""After PAUSE seconds without a step, steps take longer for a while. Nothing is learnt from the next RESUMED seconds of
steps, or tried in them: a width that had been seen in such steps alone was not chosen again (results/LOG.md)."""
SHORT_BURSTS = 8
"""Times in a row that fewer than RESUMED seconds of steps came between two pauses, after which the first steps are
learnt from, because there are no others."""
MOST_SEEN = 32.0
"""Observations of a time that count, so that it follows changes."""
HICCUP = 2.0
"""Times of one kind of step differ by less, although drafts may end early; more is a hiccup of the host, or the past.
With 1.5 the times of 12 drafts of one request on an H200 were 17 % too short (results/LOG.md)."""
FIRST_REQUESTS, MOST_REQUESTS, MOST_STEPS = 40.0, 1000.0, 200.0
"""The first guess, that all expected tokens come, counts like FIRST_REQUESTS requests. Of what requests brought, the
last MOST_REQUESTS count, or those of the last MOST_STEPS steps, if they are more."""
PROMPT_TOKENS = 256.0
"""Root of the summed squares by which prompts' tokens must differ between steps before their time is believed."""
PACE_MEMORY = 64.0
"""Steps after which an observation of a batch size's pace counts for 1/e."""
TIME_HALF_LIFE, ACCEPTANCE_HALF_LIFE = 20.0, 3.0
"""Seconds after which an observation counts half."""
MEMORY = 500.0
"""Verified drafts of requests after which an earlier one counts for 1/e."""
SURPRISE, LEFT_AFTER_SURPRISE = 4.0, 0.1
"""Standard deviations by which verdicts contradict earlier ones, and the share of these that is left then."""
TRIAL_SHARE, COMPARED_SHARE = 0.003, 0.001
"""Shares of the steps' time that may be lost by trying drafts while plain steps are the best, and plain steps while
drafts are."""
FIRST_RATE, FIRST_TRIALS = 0.8, 4.0
"""First guess of a position's acceptance, and the number of drafts that it counts for."""


@dataclass(frozen=True)
class StepTimes:
    """What an engine's steps take, in seconds, or in plain steps where `measured` is false.

    verify: by width and number of requests, a forward pass that verifies that many drafts of each request. draft: by
    number of requests, one draft step. kv_token: reading the keys and values of one token of context once. attended:
    tokens of a request's context that a draft step reads where drafts leave out a part of it (`leaves_out`). drafting:
    share of the keys and values that are of layers that draft.
    """

    verify: Mapping[int, Mapping[int, float]]
    draft: Mapping[int, float]
    kv_token: float = 0.0
    attended: float = math.inf
    measured: bool = True
    drafting: float = 1.0

    @classmethod
    def assumed(cls, draft: float) -> StepTimes:
        """In plain steps, before any measurement: a draft step takes `draft`, a draft slot nothing."""
        return cls({width: {1: 1.0} for width in WIDTHS}, {1: draft}, measured=False)

    def step(self, requests: int, width: int, context: float = 0.0) -> float:
        """A speculation step that takes all of its draft steps."""
        return self.verify_pass(requests, width) + self.kv_token * context + width * self.draft_step(requests, context)

    def verify_pass(self, requests: int, width: int) -> float:
        """The forward pass that verifies `width` drafts of each request, on a short context."""
        known = min((other for other in self.verify if other >= width), default=max(self.verify))
        return _at(self.verify[known], requests)

    def draft_step(self, requests: int, context: float = 0.0) -> float:
        kept = self.attended * requests if self.leaves_out(requests, context) else math.inf
        return _at(self.draft, requests) + self.drafting * self.kv_token * min(context, kept)

    def leaves_out(self, requests: int, context: float) -> bool:
        """Whether drafts leave out what `draft_context` lets them leave out: once reading it takes WORTH_LEAVING_OUT
        draft steps, because without it fewer drafts are accepted; always where nothing was measured."""
        unread = self.drafting * self.kv_token * (context - self.attended * requests)
        return not self.measured or unread > WORTH_LEAVING_OUT * _at(self.draft, requests)


def _at(known: Mapping[int, float], requests: int) -> float:
    """The value for `requests`, or for the next larger number; beyond the largest, in proportion."""
    numbers = sorted(known)
    place = bisect_left(numbers, requests)
    if place < len(numbers):
        return known[numbers[place]]
    return known[numbers[-1]] * (requests / numbers[-1])


@dataclass
class Acceptance:
    """How often the draft at each position stood, of those that were judged: drafted, and all before them stood.

    stood, failed: [k]. seen: when, in seconds. usual: acceptance of first drafts, however long ago, and their number;
    it is taken for positions that were not judged lately.
    """

    k: int
    stood: list[float] = field(default_factory=list)
    failed: list[float] = field(default_factory=list)
    seen: float = -math.inf
    usual: tuple[float, float] = FIRST_RATE, FIRST_TRIALS

    def __post_init__(self) -> None:
        self.stood, self.failed = [0.0] * self.k, [0.0] * self.k

    def add(self, judged: Sequence[int], stood: Sequence[int], now: float, requests: float = 0) -> bool:
        """Take in verdicts; whether they contradict earlier ones. judged, stood: of each position from the first on.

        requests: that might have drafted. Where most did not, because they copied their drafts from the text, others
        were judged than usual, which is no change of the traffic.
        """
        surprise = 2 * judged[0] >= requests and self._contradicted(judged[0], stood[0], now)
        share = MEMORY / (MEMORY + judged[0]) * self._still(now) * (LEFT_AFTER_SURPRISE if surprise else 1.0)
        self.seen = now
        self._learn_usual(judged[0], stood[0])
        for position in range(self.k):
            self.stood[position] = self.stood[position] * share + stood[position]
            self.failed[position] = self.failed[position] * share + judged[position] - stood[position]
        return surprise

    def guess(self, accepted: float, width: int, requests: int) -> None:
        """Take in a step's tokens until there are verdicts, which come some steps later. accepted: in the mean of its
        requests, of `width` drafts."""
        if self.seen == -math.inf:
            self._learn_usual((accepted + (accepted < width)) * requests, accepted * requests)

    def survival(self, now: float, draw: random.Random | None = None) -> list[float]:
        """s_1 ... s_k: the means, or drawn. A position that was not judged takes after the one before it."""
        share, before, rates = self._still(now), self.usual[0], []
        for stood, failed in zip(self.stood, self.failed, strict=True):
            good, bad = stood * share + FIRST_TRIALS * before, failed * share + FIRST_TRIALS * (1 - before)
            before = min(good / (good + bad), 0.995)
            rates.append(before if draw is None else draw.betavariate(max(good, 0.01), max(bad, 0.01)))
        return list(accumulate(rates, mul))

    def _learn_usual(self, judged: float, stood: float) -> None:
        rate, drafts = self.usual
        drafts *= MEMORY / (MEMORY + judged)
        self.usual = (rate * drafts + stood) / (drafts + judged), drafts + judged

    def _contradicted(self, judged: int, stood: int, now: float) -> bool:
        """Whether that number of first drafts that stood is a surprise, as after a change of traffic."""
        (rate,) = self.survival(now)[:1]
        return (stood - judged * rate) ** 2 > SURPRISE**2 * (judged * rate * (1 - rate) + 1)

    def _still(self, now: float) -> float:
        return _left(now - self.seen, ACCEPTANCE_HALF_LIFE)


Kind = tuple[int, int, int, bool]
"""A kind of step: batch size, bucket of contexts, width, and whether it computes prompts too."""


@dataclass
class Seen:
    """The time of one kind of step.

    seconds: mean time. prompt: mean tokens of prompts. weight: times that count; when: of the last, in seconds.
    """

    seconds: float
    prompt: float = 0.0
    weight: float = 0.0
    when: float = 0.0

    def add(self, seconds: float, prompt: float, token: float, now: float) -> None:
        """Take in a time; one that is far off, a hiccup of the host, is brought nearer. token: seconds for a token of a
        prompt."""
        self.weight = min(self.known(now), MOST_SEEN - 1)
        if self.weight >= 1:
            usual = max(self.seconds + token * (prompt - self.prompt), self.seconds / 2)
            if seconds < usual / HICCUP:  # what was known was a hiccup, or is past
                self.weight = self.weight / 2 if self.weight >= 4 else 0.0
            if self.weight:
                seconds = min(max(seconds, usual / HICCUP), usual * HICCUP)
        self.weight, self.when = self.weight + 1, now
        self.seconds += (seconds - self.seconds) / self.weight
        self.prompt += (prompt - self.prompt) / self.weight

    def known(self, now: float) -> float:
        """Times that still count."""
        return self.weight * _left(now - self.when, TIME_HALF_LIFE)


@dataclass
class Brought:
    """Tokens of steps of one width, compared with those that `Acceptance` expects: drafts may end before their width.

    excess: tokens more, or less, in shares of the expected ones, summed over `requests`. when: of the last, in seconds.
    """

    excess: float = 0.0
    requests: float = 0.0
    when: float = 0.0

    def add(self, share: float, requests: int, now: float) -> None:
        """Take in the tokens of a step, as a share of the expected ones."""
        most = max(MOST_REQUESTS, MOST_STEPS * requests)
        kept = _left(now - self.when, TIME_HALF_LIFE) * most / (most + requests)
        self.excess = self.excess * kept + (share - 1) * requests
        self.requests, self.when = self.requests * kept + requests, now

    def share(self, now: float) -> float:
        """The share of the expected tokens that comes: 1 until enough requests say otherwise."""
        left = _left(now - self.when, TIME_HALF_LIFE)
        return 1 + self.excess * left / (self.requests * left + FIRST_REQUESTS)


@dataclass
class Pace:
    """What a batch size's steps were like lately.

    mixed: share of those that compute prompts too. expected: tokens of a request expected in a step. tokens, seconds:
    those that came, and the time without that of prompts' tokens: sums that fade.
    """

    mixed: float = 0.0
    expected: float = 1.0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, mixed: bool, expected: float, tokens: float, seconds: float) -> None:
        self.mixed += (mixed - self.mixed) / PACE_MEMORY
        self.expected += (expected - self.expected) / PACE_MEMORY
        self.tokens += tokens - self.tokens / PACE_MEMORY
        self.seconds += seconds - self.seconds / PACE_MEMORY

    def mixed_share(self, tokens: float) -> float:
        """Of steps that bring a request `tokens` tokens, the share with prompts. An answer has one prompt, so prompts
        come in proportion to tokens, at random moments."""
        return 1.0 - (1.0 - min(self.mixed, 0.99)) ** (tokens / self.expected)


@dataclass(frozen=True)
class Outlook:
    """What a width is expected to take and to bring.

    seconds: of a step, without prompts' tokens. deviation: relative, of the estimate. share: see `Brought.share`. when:
    its kind of step was last seen, in seconds; -inf: never.
    """

    seconds: float
    deviation: float
    share: float
    when: float


@dataclass(frozen=True)
class Choice:
    """How the next step drafts.

    width: draft slots of each request. step_value: tokens that another draft step must be expected to bring all
    requests together to be worth its time. step_cost: what a draft step takes, in plain steps. expected: tokens a
    second of the batch. seconds: that the step is expected to take. leaves_out, measured: see `StepTimes`.
    """

    width: int
    step_value: float
    step_cost: float
    expected: float
    seconds: float
    leaves_out: bool = True
    measured: bool = True


class LengthRule:
    """Chooses widths for one engine, and learns from its steps. clock: seconds. A seed makes choices reproducible."""

    def __init__(
        self,
        times: StepTimes,
        widths: Sequence[int] = WIDTHS,
        clock: Callable[[], float] = time.perf_counter,
        seed: int = 0,
    ) -> None:
        self.times, self.widths, self.clock = times, tuple(widths), clock
        self.acceptance = Acceptance(max(widths))
        self.choices = 0
        self.trials = 0  # choices of another width than the means would have chosen
        self._random = random.Random(f"draft lengths {seed}")
        self._seen: dict[Kind, Seen] = {}
        self._yields: dict[tuple[int, int, int], Brought] = {}  # by batch size, bucket of contexts and width
        self._nearest: dict[Kind, Kind | None] = {}  # of kinds that were not seen, among those that were
        self._pace: dict[int, Pace] = {}  # by batch size
        self._tokens: dict[tuple[int, int], float] = {}  # expected of a request in a step, by batch size and width
        self._prompts = [0.0, 0.0]  # sums of which the time of a token of a prompt is the ratio
        # By batch size and limit, with the steps that are left, and when it is too old.
        self._held: dict[tuple[int, int], tuple[Choice, int, float]] = {}
        self._buckets: dict[int, int] = {}  # of contexts, by batch size
        self._brought: list[list[tuple[Brought, int, float, int]]] = [[], []]  # before the last verdicts, and since
        self._unmatched = 0  # requests of steps with draft slots without a first draft, that were not counted yet
        # Seconds that steps took, by which trials are rare: after a pause none is due.
        self._busy = 0.0
        self._usual_from = 0.0  # by these seconds, when steps take their usual time again
        self._paused, self._short = 0.0, 0  # when the last pause was, and short bursts in a row before it
        self._ended, self._expected = clock(), 0.0  # when the last step did, and seconds that a step should take
        # When a width above 0 was last chosen, whose verdicts come later, plain steps were last tried, and a width that
        # was never seen and expected to lose was.
        self._drafted = self._compared = self._explored = 0.0
        self._plain: dict[int, float] = {}  # when plain steps were last seen, by batch size

    def choose(self, requests: int, context: Callable[[], float] | float = 0.0, limit: int | None = None) -> Choice:
        """The choice for the step that begins. context: tokens of all requests together, or a function that counts
        them, which is called where a choice is due. limit: the greatest width that is allowed now."""
        load = batch_size(requests)
        most = min(self.widths[0] if limit is None else limit, max(LARGEST_VERIFY // load - 1, 0))
        held = self._held.get((load, most))
        if held is not None and held[1] and self.clock() < held[2]:
            self._held[load, most] = held[0], held[1] - 1, held[2]
            return held[0]
        tokens = context() if callable(context) else context
        self._buckets[load] = context_bucket(tokens)
        choice, steps = self._chosen(load, tokens, most)
        self._expected = choice.seconds
        self._held[load, most] = choice, steps - 1, self.clock() + 2 * steps * choice.seconds
        return choice

    def stepped(
        self,
        requests: int,
        width: int,
        seconds: float,
        prompt: int = 0,
        accepted: float = 0.0,
        latest: int | None = None,
    ) -> None:
        """Take in a step. Its context was about that of the last choice. seconds: between the moments when the tokens
        of the step before and its own were read. prompt: tokens of prompts that it computed. accepted: drafts that it
        accepted, in the mean of its requests. latest: width that was chosen last; None: the same.

        A host that launches steps before it reads earlier ones spends these seconds on launching later steps. Launching
        takes longer with drafts, so the time between a drafting step and a plain one counts for neither.
        """
        load, bucket = self._place(requests)
        kind = load, bucket, width, prompt > 0
        if self.clock() - seconds - self._ended > PAUSE:
            self._short = self._short + 1 if self._busy - self._paused < RESUMED else 0
            self._paused = self._busy
            self._usual_from = self._busy + (RESUMED if self._short < SHORT_BURSTS else 0.0)
        self._busy, self._ended = self._busy + seconds, self.clock()
        if self._resuming() or (latest is not None and (latest > 0) != (width > 0)):
            return
        if not (width or prompt):
            self._plain[load] = self._busy
        if kind not in self._seen:
            self._seen[kind] = Seen(seconds, prompt)
            self._nearest.clear()
        seen = self._seen[kind]
        if prompt:
            longer = prompt - seen.prompt
            self._prompts = [
                (1 - 1 / MEMORY) * total + longer * other
                for total, other in zip(self._prompts, (seconds - seen.seconds, longer), strict=True)
            ]
        token = self._token_seconds()
        seen.add(seconds, prompt, token, self.clock())
        usual = seen.seconds + token * (prompt - seen.prompt)
        # A host has hiccups, and what a token of a prompt takes is an estimate.
        took = max(min(seconds, 2 * usual) - token * prompt, usual / 4)
        expected = self._tokens.get((load, width), 1.0)
        self._pace.setdefault(load, Pace()).add(prompt > 0, expected, 1 + accepted, took)

    def brought(self, requests: int, width: int, accepted: float) -> None:
        """A verify pass of `width` drafts a request brought `accepted` of them, in the mean of its requests."""
        if width:
            kind = self._yields.setdefault((*self._place(requests), width), Brought())
            self._brought[-1].append((kind, width, accepted, requests))
            self.acceptance.guess(accepted, width, requests)

    def judged(self, judged: Sequence[int], stood: Sequence[int]) -> None:
        """Take in verdicts; see `Acceptance.add`.

        Steps are compared with an acceptance that knows of them: verdicts may come a copy later. What was learnt under
        another acceptance is forgotten. Steps in which nothing was drafted have no verdicts, but count too.
        """
        requests: float = sum(requests for *_, requests in self._brought[0])
        if not self.times.draft_step(1):
            # With prompt lookup alone, no match is worth what a draft that failed is. Verdicts may be of a step or two
            # more or less, which looks like a change of the traffic.
            self._unmatched += int(requests) - judged[0]
            missing = max(self._unmatched, 0)
            judged, requests = [judged[0] + missing, *judged[1:]], math.inf
            self._unmatched -= missing
        if judged[0] and self.acceptance.add(judged, stood, self.clock(), requests):
            self._yields.clear()
            self._brought = [[], []]
            return
        survival = self.acceptance.survival(self.clock())
        for brought, width, accepted, requests in self._brought.pop(0):
            brought.add(accepted / sum(survival[:width]), requests, self.clock())
        self._brought.append([])

    def _resuming(self) -> bool:
        """Whether steps take longer than usual, because there was a pause."""
        return self._busy < self._usual_from or self.clock() - self._ended > PAUSE + 2 * self._expected

    def _place(self, requests: int) -> tuple[int, int]:
        """What a batch counts as: its size, and the bucket of its contexts."""
        load = batch_size(requests)
        return load, self._buckets.get(load, 0)

    def _chosen(self, load: int, context: float, most: int) -> tuple[Choice, int]:
        """The choice, and the steps that it holds for."""
        now = self.clock()
        survival = self.acceptance.survival(now)
        outlooks = {width: self._outlook(load, context, width, survival, now) for width in self.widths if width <= most}
        speeds = {width: _tokens(survival, width, there.share) / there.seconds for width, there in outlooks.items()}
        self._tokens |= {(load, width): speeds[width] * there.seconds for width, there in outlooks.items()}
        best = max(speeds, key=speeds.__getitem__)
        self.choices += 1
        width, steps = self._width(load, outlooks, speeds, best)
        self.trials += width != best
        if width:
            self._drafted = self._busy
        elif best:
            self._compared = self._busy
        plain = outlooks[min(outlooks)].seconds
        # A plain step takes at least what it takes the device. Where it takes less, the times at the start are too
        # long, as those that were measured while others used the GPU.
        real = plain / self.times.verify_pass(load, 0)
        step = self.times.draft_step(load, context) * (min(real, 1.0) if self.times.measured else real)
        pace = self._pace.get(load)
        speed = speeds[best] if pace is None else pace.tokens / pace.seconds
        # A trial of drafts while plain steps are the best has to draft: what was learnt speaks against its first step.
        value = speed * load * step if best or not width else 0.0
        expected = speeds[width] * load, outlooks[width].seconds
        leaves_out, measured = self.times.leaves_out(load, context), self.times.measured
        return Choice(width, value, step / plain, *expected, leaves_out, measured), steps

    def _width(
        self, load: int, outlooks: Mapping[int, Outlook], speeds: Mapping[int, float], best: int
    ) -> tuple[int, int]:
        """The best width, or a trial of another, and the steps that it holds for."""
        if self._resuming():
            return best, HELD
        losses = {width: there.seconds * (1 - speeds[width] / speeds[best]) for width, there in outlooks.items()}
        held = LEAST_HELD if best else HELD
        spare = UNSEEN_SHARE * (self._busy - self._explored) / held
        # The time of plain steps is seen, not predicted: drafting takes the host longer.
        unseen = [
            width
            for width, there in outlooks.items()
            if there.when == -math.inf
            and (not width or (speeds[width] >= PLAUSIBLE * speeds[best] and losses[width] <= spare))
        ]
        if unseen:
            width = max(unseen, key=speeds.__getitem__) if min(unseen) else 0
            if width and losses[width]:
                self._explored = self._busy
            return width, held if width else HELD
        other = 0 if best else max((width for width in outlooks if width), key=speeds.__getitem__, default=0)
        loss = HELD * losses[other]
        since = self._busy - (self._drafted if other else max(self._compared, self._plain.get(load, 0.0)))
        width = best
        if since * (TRIAL_SHARE if other else COMPARED_SHARE) > loss:
            width = other
        elif best and self.choices % TRIED_EVERY == 0:
            survival = self.acceptance.survival(self.clock(), self._random)
            drawn = {
                each: _tokens(survival, each, there.share)
                / (there.seconds * math.exp(there.deviation * self._random.gauss(0.0, 1.0)))
                for each, there in outlooks.items()
            }
            width = max(drawn, key=drawn.__getitem__)
        return width, HELD if best or width else PLAIN_HELD

    def _outlook(self, load: int, context: float, width: int, survival: Sequence[float], now: float) -> Outlook:
        """What a width is expected to take and to bring, at the share of steps with prompts of that width."""
        bucket = context_bucket(context)
        brought = self._yields.get((load, bucket, width))
        share = 1.0 if brought is None else brought.share(now)
        mixed = self._pace.get(load, Pace()).mixed_share(_tokens(survival, width, share))
        seconds = spread = 0.0
        for prompts, part in ((False, 1.0 - mixed), (True, mixed)):
            seen = self._seen.get((load, bucket, width, prompts))
            expected = part * self._seconds(load, context, width, prompts) if part else 0.0
            seconds += expected
            spread += expected * SPREAD / math.sqrt(1 + 2 * (0.0 if seen is None else seen.known(now)))
        usual = self._seen.get((load, bucket, width, mixed > 0.5))
        return Outlook(seconds, spread / seconds, share, -math.inf if usual is None else usual.when)

    def _seconds(self, load: int, context: float, width: int, prompts: bool) -> float:
        """What a kind of step takes, without the tokens of prompts. One never seen is predicted from the nearest
        one: its time beyond the times at the start (with prompts: beyond a step without) is the host's, which is the
        same for both. If it took less, the times at the start are too long by as much."""
        bucket = context_bucket(context)
        seen = self._seen.get((load, bucket, width, prompts))
        if seen is not None:
            return seen.seconds - self._token_seconds() * seen.prompt
        own = self._seconds(load, context, width, False) if prompts else self.times.step(load, width, context)
        near = self._near((load, bucket, width, prompts))
        if near is None:
            return own
        there = context if near[1] == bucket else _context(near[1])
        took = self._seconds(near[0], there, near[2], prompts)
        if prompts:
            return own + max(took - self._seconds(near[0], there, near[2], False), 0.0)
        expected = self.times.step(near[0], near[2], there)
        return own + took - expected if self.times.measured and took > expected else own * took / expected

    def _near(self, kind: Kind) -> Kind | None:
        """The seen kind nearest to one that was not, with prompts as that one or not; None if there is none. Cached,
        because choices are made between two steps."""
        if kind not in self._nearest:
            alike = [key for key in self._seen if key[3] == kind[3]]
            self._nearest[kind] = min(alike, key=lambda key: _distance(key, kind), default=None)
        return self._nearest[kind]

    def _token_seconds(self) -> float:
        """Seconds for a token of a prompt, by the steps of a kind whose prompts differ."""
        product, square = self._prompts
        return max(product / (square + PROMPT_TOKENS**2), 0.0)


def _left(seconds: float, half_life: float) -> float:
    """The share of an observation that still counts after `seconds`."""
    return 0.5 ** (seconds / half_life)


def batch_size(requests: int) -> int:
    place = bisect_left(REQUESTS, requests)
    return REQUESTS[place] if place < len(REQUESTS) else -(-requests // 64) * 64


def context_bucket(tokens: float) -> int:
    """0 for a short context of a batch, and one more for each doubling."""
    return max(0, math.ceil(math.log2(max(tokens, 1.0) / SHORT_CONTEXT)))


def _context(bucket: int) -> float:
    """Tokens of context that represent a bucket."""
    return 0.75 * SHORT_CONTEXT * 2**bucket


def _tokens(survival: Sequence[float], width: int, share: float) -> float:
    """Expected tokens of a request in a step of a width; `share` of the expected drafts come."""
    return 1.0 + share * sum(survival[:width])


def _distance(key: Kind, kind: Kind) -> tuple[bool, float, int]:
    """How far one kind of step is from another: drafting or not first, then batch and context, then width."""
    return (
        (key[2] > 0) != (kind[2] > 0),
        abs(math.log2(key[0] / kind[0])) + abs(key[1] - kind[1]),
        abs(key[2] - kind[2]),
    )
