"""The measuring loop: one arm, or several settings of one live engine, plain decoding among them; and the bench, which
measures one arm whole: speed, drafting, latencies, perplexity.

Several settings alternate after every prompt chunk, a second or less each, so that whatever slows the machine slows all
of them, and their ratios stay true. Every repeat generates the same tokens from the same prompts.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.config.schema import Method, RunConfig
from selfspec_cli.early_exit import counters
from selfspec_cli.early_exit.cost_model import Costs, fit_costs
from selfspec_cli.early_exit.counters import VerifyCounts
from selfspec_cli.early_exit.replay import Setting
from selfspec_cli.engine import cores
from selfspec_cli.engine import requests as asking
from selfspec_cli.engine.live import Engine, Generation
from selfspec_cli.engine.requests import Passage
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import point
from selfspec_cli.record.columns import disturbed
from selfspec_cli.record.point import Measurement
from selfspec_cli.record.quality import Scores
from selfspec_cli.record.statistics import by_category, speedup_interval
from selfspec_cli.stages import humaneval
from selfspec_cli.texts import library
from selfspec_cli.texts.prompts import Turn, workload_turns

PLAIN = Setting("none", None, 0)  # no drafts at all
AS_FOUND = Setting("as found", None, 0)  # leaves the engine as it was set up
Repeat = list[Generation]  # what one arm generated in one repeat: a generation for each prompt chunk


@dataclass
class Arm:
    """One setting and what it did in each repeat."""

    setting: Setting
    repeats: list[Repeat] = field(default_factory=list)

    @property
    def tok_s(self) -> list[float]:
        """Generated tokens a second, one number a repeat."""
        return [_tokens(repeat) / sum(part.seconds for part in repeat) for repeat in self.repeats]

    @property
    def median(self) -> float:
        """Tokens a second of a median repeat: each prompt chunk takes the median of its times. A machine that stalls
        spoils one chunk of one arm, and with it that arm's whole repeat; not its median chunk."""
        seconds = (statistics.median(part.seconds for part in chunk) for chunk in zip(*self.repeats, strict=True))
        return _tokens(self.repeats[0]) / sum(seconds)

    def outputs(self) -> list[list[int]]:
        """Token ids of the last repeat, one list a prompt."""
        return [output for part in self.repeats[-1] for output in part.outputs]

    def to_dict(self, reference: "Arm") -> dict[str, Any]:
        """As JSON, with the speed over `reference`, which took turns with this arm."""
        parts = [part for repeat in self.repeats for part in repeat]
        verified = VerifyCounts.total(part.verified for part in parts)
        accepted = verified.accepted if verified else 0
        drafted = sum(part.drafted for part in parts)
        low, high = speedup_interval(self.tok_s, reference.tok_s, paired=True) or (None, None)
        return {
            **asdict(self.setting),
            "tok_s": self.tok_s,
            "tok_s_median": self.median,
            "speedup": self.median / reference.median,
            "speedup_low": low,
            "speedup_high": high,
            "accept_rate": accepted / drafted if drafted else None,
            "mean_accepted_len": 1 + accepted / verified.rounds if verified and verified.rounds else None,
        }


def apply(engine: Engine, setting: Setting) -> None:
    engine.set_draft_length(setting.k)
    engine.set_gate(setting.gate, setting.threshold)


def run(
    engine: Engine,
    cfg: RunConfig,
    prompts: Sequence[Turn],
    settings: Sequence[Setting] = (AS_FOUND,),
    *,
    repeats: int,
    warmup: int = 1,
    timed: Callable[[], Any] | None = None,
    another: Callable[[float], bool] | None = None,
    progress: Progress = ignore,
) -> list[Arm]:
    """Run every setting over every prompt `repeats` times, after `warmup` times that are thrown away. One arm has all
    prompts at once, `cfg.workload.batch` of them in flight; several take turns chunk by chunk, and the order turns
    around from chunk to chunk. settings: what each arm drafts by; AS_FOUND leaves the engine as it is. timed: called
    once, when warming up is over. another: whether to go on after a repeat, given the seconds that it took."""
    arms, work = [Arm(setting) for setting in settings], cfg.workload
    how: dict[str, Any] = {"batch": work.batch, "temperature": work.temperature, "seed": cfg.seed}
    size = work.batch if len(arms) > 1 else len(prompts)
    chunks = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    for number in range(warmup + repeats):
        if number == warmup and timed is not None:
            timed()
        taken: list[Repeat] = [[] for _ in arms]
        # One chunk is enough to warm up: it has run every setting's code.
        for place, chunk in enumerate(chunks if number >= warmup else chunks[:1]):
            for arm, generations in list(zip(arms, taken, strict=True))[:: 1 if (place + number) % 2 else -1]:
                interrupts.check()
                if arm.setting is not AS_FOUND:
                    apply(engine, arm.setting)
                generations.append(engine.generate(chunk, work.output_len, **how))
        if number < warmup:
            progress("warm-up", number + 1, warmup)
            continue
        for arm, generations in zip(arms, taken, strict=True):
            arm.repeats.append(generations)
        done = number + 1 - warmup
        progress("repeats", done, repeats)
        seconds = sum(part.seconds for generations in taken for part in generations)
        if done < repeats and another is not None and not another(seconds):
            progress.ended("repeats", done, repeats)
            break
    return arms


def costs(plain: Arm, drafting: Sequence[Arm]) -> Costs:
    """What a step costs here, from arms of fixed draft lengths; seconds of a step of the whole batch."""
    points = []
    for arm in drafting:
        parts = _typical(arm)
        own = counters.total(part.drafting for part in parts)
        assert own is not None
        seconds = sum(part.seconds for part in parts)
        points.append((own["steps"] / own["rounds"], seconds, own.get("seconds"), float(own["rounds"])))
    parts = _typical(plain)
    # A step yields a token for each request of the batch; what one request waits for a token is the step.
    in_flight = statistics.mean(len(part.outputs) for repeat in plain.repeats for part in repeat)
    return fit_costs(points, sum(part.seconds for part in parts) / _tokens(parts) * in_flight)


def _typical(arm: Arm) -> Repeat:
    """Of every prompt chunk the repeat that took the median time (the shorter of two): a stall spoils the others."""
    chunks = zip(*arm.repeats, strict=True)
    return [sorted(chunk, key=lambda part: part.seconds)[(len(chunk) - 1) // 2] for chunk in chunks]


def _tokens(repeat: Sequence[Generation]) -> int:
    return sum(len(output) for part in repeat for output in part.outputs)


WINDOW = 512  # tokens; long enough that most tokens have hundreds of tokens of context
OWN_DISTRIBUTION = (Method.baseline, Method.skip)
"""Methods whose predictions of a given text are their own. Prompt log-probabilities of an arm that drafts are the
target's, drafts or none, so that its figure would be the baseline's whatever it generates."""


def bench(cfg: RunConfig, engine: Engine, progress: Progress = ignore, *, execute: bool = False) -> Measurement:
    """Warm up, time `cfg.repeats` repeats, score held-out text. execute: run the answers with their tests."""
    began = time.perf_counter()
    with suppress(OSError):  # let the peak of memory begin anew; some containers forbid it
        Path("/proc/self/clear_refs").write_text("5")
    start = [cores.now()]

    def timed() -> None:
        engine.call("early_exit_meter_start")
        start.append(cores.now())
        used = cores.shares(*start)
        if disturbed(used.get("cpu_own"), used.get("cpu_others")):
            progress.busy(used["cpu_others"])

    requests, kinds = workload_turns(cfg, engine)
    (arm,) = run(engine, cfg, requests, repeats=cfg.repeats, warmup=cfg.warmup, timed=timed, progress=progress)
    used, repeats = cores.shares(start[-1], cores.now()), [part for (part,) in arm.repeats]
    names = ("layer", "weights_mib", "draft_mib", "kv_blocks", "max_model_len")
    facts: dict[str, Any] = {name: getattr(engine, name) for name in names}
    facts |= engine.call("early_exit_meter_stop") | used
    facts["step_bytes"] = engine.call("early_exit_step_bytes")
    if kinds:
        facts["categories"] = by_category([list(zip(kinds, one.requests, one.steps, strict=True)) for one in repeats])
    if execute:
        facts["pass_at_1"] = humaneval.scored(cfg, [engine.answer(output) for output in arm.outputs()])
    outputs = point.output_digests(arm.outputs())
    tells = cfg.workload.batch > 1 and not cfg.workload.temperature and cfg.model.load_format != "dummy"
    if cfg.method is Method.baseline and tells:
        facts[point.AS_ITSELF] = as_itself(engine, cfg, requests, outputs)
    interrupts.check()
    scored = perplexity(engine, cfg)
    facts.setdefault("peak_mem_mib", peak_memory_mib())
    return Measurement(
        tuple(point.Repeat(one.seconds, tuple(one.requests), one.verified, one.drafting) for one in repeats),
        outputs=outputs,
        engine=facts,
        perplexity=scored,
        seconds=time.perf_counter() - began,
    )


def perplexity(engine: Engine, cfg: RunConfig) -> float | None:
    """exp of the mean negative log-likelihood over about `cfg.perplexity_tokens` held-out tokens; None where an arm has
    none of its own, or it is not wanted. All but the first token of a window are predicted from all before them."""
    tokens = cfg.perplexity_tokens
    if not tokens or cfg.method not in OWN_DISTRIBUTION:
        return None
    # One token less than the model takes, because scoring a window asks the engine for one more.
    length = min(WINDOW, engine.max_model_len - 1, tokens + 1)
    count = max(1, tokens // (length - 1))
    windows = library.token_windows(engine.encode, library.held_out_text(), length, count, cfg.seed)
    scores = asking.score(engine, [Passage(window) for window in windows])
    return Scores([-one.log_likelihood for one in scores], [one.tokens for one in scores]).perplexity


def as_itself(engine: Engine, cfg: RunConfig, requests: Sequence[Turn], outputs: Sequence[str]) -> int:
    """Ask everything again, the last question first; how many outputs (digests) are as before: the arms' control."""
    first = [place for place, request in enumerate(requests) if not callable(request)]
    questions = [range(begin, end) for begin, end in pairwise([*first, len(requests)])]
    order = [place for question in reversed(questions) for place in question]
    work = cfg.workload
    again = engine.generate([requests[place] for place in order], work.output_len, batch=work.batch, seed=cfg.seed)
    digests = point.output_digests(again.outputs)
    return sum(outputs[place] == digest for place, digest in zip(order, digests, strict=True))


def peak_memory_mib() -> float | None:
    """Peak resident memory (MiB) of this process since the last reset; None where /proc does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peaks[0]) / 1024 if peaks else None
