"""What each engine does in a run: the arm that drafts, and the plain one, which is asked about what differs."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from selfspec_cli.config.schema import ConfigError, Method, RunConfig, gate_threshold
from selfspec_cli.early_exit import counters
from selfspec_cli.early_exit.counters import VerifyCounts
from selfspec_cli.early_exit.errors import on_one_line
from selfspec_cli.early_exit.gates import GATES, device_features
from selfspec_cli.early_exit.head_metadata import SUFFIX, read_metadata
from selfspec_cli.engine import requests as asking
from selfspec_cli.engine.deployment import head_path
from selfspec_cli.engine.live import Engine
from selfspec_cli.engine.requests import Answer, Request
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.stages.verify import greedy, sampling, verdict
from selfspec_cli.stages.verify.greedy import Case, Difference, Facts, Gate, Observed, Size
from selfspec_cli.stages.verify.sampling import Drawn
from selfspec_cli.texts import library

FOREIGN_HEAD, EVERY = "foreign_head", "all"
WINDOWS = 24  # stretches of text from which the prompts are cut


@dataclass(frozen=True)
class Wanted:
    """What a run is to do. only: groups of cases, empty for all. tolerance: None is that of the dtype. plant: a fault
    that stays in the arm's engine for the whole run, or EVERY for runs without and with each of them. repeat: runs on
    one engine. brief: nothing is planted for proof, and one way to sample is enough."""

    size: Size = greedy.QUICK
    thorough: bool = False
    only: tuple[str, ...] = ()
    batch_invariant: bool = False
    tolerance: float | None = None
    plant: str | None = None
    repeat: int = 1
    brief: bool = False

    @property
    def settings(self) -> list[str]:
        """The ways to sample."""
        names = list(sampling.SETTINGS if self.thorough else sampling.QUICK) if self.size.samples else []
        return names[:1] if self.brief else names


@dataclass
class Arm:
    """What the arm's engine did in one run."""

    seed: int
    facts: Facts
    cases: list[Case]
    observed: dict[str, Observed] = field(default_factory=dict)
    proof: list[Answer] = field(default_factory=list)
    biased: Drawn | None = None
    drawn: dict[str, Drawn] = field(default_factory=dict)
    alone: VerifyCounts | None = None  # counters of the requests of `mixed`, one at a time
    drafted: int = 0  # tokens; on CUDA places verified may hold none
    claimed: float | None = None  # agreement of the head where it was fitted, where its file says so

    @property
    def mixed(self) -> Case:
        return self.cases[0]

    @property
    def prompt(self) -> list[int]:
        """The prompt of the sampled texts."""
        return self.facts.windows[-1][: sampling.PROMPT]

    def proof_requests(self, size: Size) -> list[Request]:
        """Greedy requests on which the planted fault is shown."""
        return [Request(one.prompt, 24) for one in greedy.requests(self.facts, size, self.seed)[:8]]


def _facts(engine: Engine, cfg: RunConfig, seed: int, size: Size) -> Facts:
    text = not engine.llm.model_config.skip_tokenizer_init
    budget = int(cfg.engine.max_num_batched_tokens or 0)
    length = min(budget + 40, engine.max_model_len - max(size.tokens) - 2)
    if length < 16:
        raise ConfigError(
            f"model.max_model_len={engine.max_model_len}: too short to verify on; at least {max(size.tokens) + 18}"
        )
    if text:
        windows = library.token_windows(engine.encode, library.held_out_text(), length, WINDOWS, seed)
    else:
        draw = random.Random(seed)
        windows = [[draw.randrange(3, engine.vocab_size) for _ in range(length)] for _ in range(WINDOWS)]
    return Facts(engine.vocab_size, engine.max_model_len, cfg.engine.max_num_seqs, budget, text, windows)


def perform(engine: Engine, cfg: RunConfig, wanted: Wanted, seed: int, progress: Progress = ignore) -> Arm:
    """All that the arm's engine has to do in one run; what is planted for proof is taken out again."""
    facts = _facts(engine, cfg, seed, wanted.size)
    early = cfg.method is Method.layer_skip
    if early:
        facts = replace(facts, gates=_gates(engine, greedy.requests(facts, wanted.size)))
    arm = Arm(seed, facts, claimed=_claimed(cfg), cases=_chosen(greedy.all_cases(facts, wanted.size), cfg, wanted))
    _restore(engine, cfg)
    if not wanted.brief:
        engine.call("early_exit_plant", "accept_one_more")
        asking.forget_prefixes(engine)
        arm.proof = asking.answers(engine, arm.proof_requests(wanted.size), batch=4)
        if wanted.size.samples:
            engine.call("early_exit_plant", "biased_sampler")
            arm.biased = draw(engine, arm, wanted, sampling.QUICK[0], 900)
        engine.call("early_exit_mend")
    if wanted.plant is not None and wanted.plant != FOREIGN_HEAD:  # a head is loaded with the engine
        engine.call("early_exit_plant", wanted.plant)
    before = _drafted(engine)
    for done, case in enumerate(arm.cases, start=1):
        _restore(engine, cfg)
        arm.observed[case.name] = greedy.perform(engine, case, drafting=True)
        progress("cases", done, len(arm.cases))
    _restore(engine, cfg)
    arm.drafted = _drafted(engine) - before
    if early:
        _probe_cache(engine, arm)
        arm.alone = greedy.perform(engine, replace(arm.mixed, batch=1), drafting=True).counts
    for number, name in enumerate(wanted.settings):
        try:
            arm.drawn[name] = draw(engine, arm, wanted, name, number)
        except ConfigError:
            raise
        except Exception as error:  # vLLM's own methods end over some requests; what came before can still be judged
            ended = Drawn(None, ended=on_one_line(error)[:200])
            arm.drawn |= dict.fromkeys(wanted.settings[number:], ended)
            return arm
        progress("ways to sample", number + 1, len(wanted.settings))
    engine.call("early_exit_mend")
    _restore(engine, cfg)
    return arm


def _drafted(engine: Engine) -> int:
    """Tokens drafted so far: the draft loop's own count, or the places verified of a drafter that keeps none."""
    own, verified = engine.call("early_exit_counters"), engine.verify_counts()
    return counters.made(own) if own is not None else 0 if verified is None else verified.places


def _restore(engine: Engine, cfg: RunConfig) -> None:
    if cfg.method is Method.layer_skip:
        engine.set_gate(str(cfg.gate.kind), gate_threshold(cfg))
        engine.set_draft_length(int(cfg.k or 0))


def _gates(engine: Engine, requests: list[Request]) -> tuple[Gate, ...]:
    """Every gate of this device, at the median of its statistic over logged drafts, which ends about half of them."""
    with engine.recording() as read:
        asking.answers(engine, requests, batch=4)
        log = read()
    if not len(log.drafted):
        return ()
    medians = {name: float(log.feature(name)[log.was_drafted].nanmedian()) for name in device_features()}
    return tuple((name, min(max(value, GATES[name].low), GATES[name].high)) for name, value in medians.items())


def _claimed(cfg: RunConfig) -> float | None:
    path = head_path(cfg) if cfg.method is Method.layer_skip else None
    if path is None or not path.endswith(SUFFIX):
        return None
    return read_metadata(path).fit.get("agreement")


def _chosen(found: list[Case], cfg: RunConfig, wanted: Wanted) -> list[Case]:
    """The cases that were asked for; with a gate in force one without it, to tell whose fault a difference is."""
    if cfg.method is Method.layer_skip and cfg.gate.kind != "none":
        few = next(case for case in found if case.name == "preempted").requests
        found.append(Case("gate none", "without the gate", few, found[0].batch, gates=(("none", None),)))
    return [case for case in found if not wanted.only or case.group in ("mixed", *wanted.only)]


def draw(engine: Engine, arm: Arm, wanted: Wanted, name: str, stream: int) -> Drawn:
    """Texts of one setting. stream: no two of a run are equal, so that no two samples share a seed."""
    size, first = wanted.size, (arm.seed * 1000 + stream) * 100_000
    return sampling.draw(engine, arm.prompt, name, size.samples, size.sampled_tokens, first)


def _probe_cache(engine: Engine, arm: Arm) -> None:
    """Go on, without drafts, from the keys and values that drafting has left: what a draft has spoilt shows."""
    before = arm.mixed
    greedy.perform(engine, before, drafting=True)
    written_by_drafting = [
        Request([*request.prompt, *answer.tokens], 8)
        for request, answer in zip(before.requests, arm.observed["mixed"].answers, strict=True)
        if len(request.prompt) + len(answer.tokens) + 8 <= engine.max_model_len
    ]
    engine.set_draft_length(0)
    about = "decoding without drafts from the keys and values that drafting has left in the cache"
    case = Case("cache", about, written_by_drafting, before.batch, fresh=False)
    arm.observed["cache"] = greedy.perform(engine, case, drafting=True)
    arm.cases.append(case)
    engine.set_draft_length(int(engine.cfg.k or 0))


def tolerance_of(cfg: RunConfig, wanted: Wanted) -> float:
    """Gap in nats up to which two tokens are level."""
    if wanted.tolerance is not None:
        return wanted.tolerance
    names = {"float": "float32", "half": "float16", "auto": "bfloat16"}  # as the checkpoint says, which is mostly this
    return greedy.TOLERANCE[names.get(cfg.model.dtype, cfg.model.dtype)]


@dataclass(frozen=True)
class Unsure:
    """A case some of whose outputs differ: what another plain engine, that takes k + 1 tokens a step, is asked about.
    row: of the document. level: near-ties, and in batch-invariant mode all differences. answers: the plain engine's."""

    row: dict[str, Any]
    compared: int
    level: list[Difference]
    requests: list[Request]
    answers: list[Answer]


def judge(
    engine: Engine, cfg: RunConfig, wanted: Wanted, arm: Arm, progress: Progress = ignore
) -> tuple[dict[str, Any], list[Unsure]]:
    """The document of one run, and the cases in which outputs differ."""
    tolerance, rows, unsure = tolerance_of(cfg, wanted), [], []
    sampled = {name: _plain_samples(engine, wanted, arm, number) for number, name in enumerate(wanted.settings)}
    proof = _prove(engine, wanted, arm, sampled, tolerance)
    plain_repeats: dict[str, int] | None = None
    mixed: Observed | None = None
    for done, case in enumerate(arm.cases, start=1):
        ours, plain = arm.observed[case.name], greedy.perform(engine, case, drafting=False)
        differences = greedy.differences(case.requests, ours.answers, plain.answers)
        greedy.ask(engine, differences, tolerance)
        if differences and plain_repeats is None:
            plain_repeats = _repeat_plain(engine, arm.mixed, mixed or plain, tolerance)
        mixed = mixed or plain  # which is the first case
        compared = sum(request.greedy for request in case.requests)
        unlike = greedy.unlike_scores(case.requests, ours.answers, plain.answers, tolerance)
        noise = plain_repeats or {"differ": 0, "near_ties": 0, "compared": 0}
        kinds = [difference.kind for difference in differences]
        judged, note = verdict.case_row(kinds, compared, unlike, noise, wanted.batch_invariant)
        said = {"verdict": judged, "note": note or _hollow(case, ours, plain), "compared": compared}
        rows.append(_case_row(case, ours, plain, differences) | said | {"plain_differs": judged == verdict.NOT_SHOWN})
        level = [one for one in differences if wanted.batch_invariant or one.nearly_level(tolerance)]
        if level:
            unsure.append(Unsure(rows[-1], compared, level, case.requests, plain.answers))
        progress("cases compared", done, len(arm.cases))
    exact = wanted.batch_invariant or cfg.model.dtype in ("float32", "float")
    document = {
        "gate": str(cfg.gate.kind) if cfg.method is Method.layer_skip else "none",
        "seed": arm.seed,
        "proof": proof,
        "cases": rows,
        "own_drafts": _own_drafts(arm, exact and not any(row["plain_differs"] for row in rows)),
        "head": verdict.head(arm.claimed, arm.alone),
        "sampling": [
            sampling.judge(name, ours, sampled[name], sampling.exact(engine, arm.prompt, name) if ours.sample else None)
            for name, ours in arm.drawn.items()
        ],
        "plain_repeats": plain_repeats,
        "drafted": arm.drafted,
        "accepted": sum(observed.counts.accepted for observed in arm.observed.values() if observed.counts),
    }
    return document, unsure


def judge_together(
    engine: Engine, cfg: RunConfig, wanted: Wanted, judged: Sequence[tuple[Arm, dict[str, Any], list[Unsure]]]
) -> None:
    """Ask a plain engine that takes k + 1 tokens a step. Where it says something else than the other plain engine in
    batch-invariant mode, vLLM's kernels are not batch-invariant here, and a difference is no fault of drafting."""
    tolerance, k = tolerance_of(cfg, wanted), int(cfg.k or 0)
    for arm, document, unsure in judged:
        doubtful = [difference for case in unsure for difference in case.level[:4]][:16]
        greedy.ask_together(engine, doubtful, k + 1, tolerance)
        if not wanted.batch_invariant:
            continue
        for case in unsure:
            together = greedy.unlike_together(engine, case.requests, case.answers)
            turned = sum(difference.turned for difference in case.level)
            case.row["plain_together"] = together
            note = verdict.not_invariant(len(case.level), turned, case.compared, together, k)
            if case.row["verdict"] == verdict.FAULT and case.row["note"] is None and note is not None:
                case.row.update(verdict=verdict.NOT_SHOWN, note=note, plain_differs=True)
        if any(row.get("plain_differs") for row in document["cases"]):
            document["own_drafts"] = _own_drafts(arm, exact=False)


def _case_row(case: Case, ours: Observed, plain: Observed, found: Sequence[Difference]) -> dict[str, Any]:
    drafts = {} if ours.counts is None else {"drafted": ours.counts.places, "accepted": ours.counts.accepted}
    return drafts | {
        "name": case.name,
        "about": case.about,
        "tokens": sum(len(one.tokens) for one in ours.answers),
        "differ": len(found),
        "near_ties": sum(one.kind == "near-tie" for one in found),
        "differences": found,
        "preempted": ours.preempted,
        "cached_tokens": ours.cached,
        "ended": dict(Counter(str(one.ended[0]) for one in plain.answers)),
        "seconds": ours.seconds,
        "seconds_plain": plain.seconds,
    }


def _hollow(case: Case, ours: Observed, plain: Observed) -> str | None:
    """What a case was there for and did not happen; it does not make the case wrong, and shows less."""
    if case.meanwhile == "preempt" and not (ours.preempted and plain.preempted):
        return "nothing was preempted"
    if case.name == "cache" and not ours.cached:
        return "no prompt came from the cache: all were shorter than one of its blocks"
    return None


def _prove(
    engine: Engine, wanted: Wanted, arm: Arm, sampled: dict[str, list[Drawn]], tolerance: float
) -> dict[str, dict[str, Any]]:
    """What was planted must be found by the same judgement that the cases get. sampled: the plain engine's texts."""
    proof: dict[str, dict[str, Any]] = {}
    if wanted.brief:
        return proof
    asking.forget_prefixes(engine)
    requests = arm.proof_requests(wanted.size)
    differences = greedy.differences(requests, arm.proof, asking.answers(engine, requests, batch=4))
    greedy.ask(engine, differences, tolerance)
    wrong = sum(difference.kind == "fault" for difference in differences)
    proof["accept_one_more"] = {"caught": wrong > 0, "differ": len(differences), "compared": len(requests)}
    if arm.biased is not None:
        row = sampling.judge("biased", arm.biased, sampled[sampling.QUICK[0]], None)
        proof["biased_sampler"] = {"caught": row["verdict"] == "differs", "p": row.get("p")}
    return proof


def _repeat_plain(engine: Engine, mixed: Case, first: Observed, tolerance: float) -> dict[str, int]:
    """How many outputs of `mixed` the plain engine does not repeat in reverse order and with half the batch."""
    turned = replace(mixed, requests=mixed.requests[::-1], batch=max(1, mixed.batch // 2))
    again = greedy.perform(engine, turned, drafting=False)
    differences = greedy.differences(mixed.requests, again.answers[::-1], first.answers)
    greedy.ask(engine, differences, tolerance)
    near = sum(difference.kind == "near-tie" for difference in differences)
    return {"compared": len(mixed.requests), "differ": len(differences), "near_ties": near}


def _own_drafts(arm: Arm, exact: bool) -> dict[str, Any] | None:
    company = arm.observed["mixed"].counts
    return None if arm.alone is None or company is None else verdict.own_drafts(arm.alone, company, exact)


def _plain_samples(engine: Engine, wanted: Wanted, arm: Arm, number: int) -> list[Drawn]:
    """Two samples of the plain engine by the `number`th way to sample; by none that the arm's engine has refused."""
    name = wanted.settings[number]
    if arm.drawn[name].sample is None:
        return [arm.drawn[name]] * 2
    return [draw(engine, arm, wanted, name, 100 + 2 * number + half) for half in range(2)]
