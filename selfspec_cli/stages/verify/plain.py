"""The plain engine's side of a run: it does what the arm has done, and is asked about what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from selfspec_cli.config.schema import Method, RunConfig
from selfspec_cli.engine import requests as asking
from selfspec_cli.engine.live import Engine
from selfspec_cli.engine.requests import Answer, Request
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.stages.verify import greedy, sampling, verdict
from selfspec_cli.stages.verify.arm import Arm, Wanted, draw
from selfspec_cli.stages.verify.cases import Case
from selfspec_cli.stages.verify.greedy import Difference, Observed
from selfspec_cli.stages.verify.sampling import Drawn


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
    """Ask a plain engine that takes k + 1 tokens a step; what it says goes into the documents. In batch-invariant mode
    it must say what the other plain engine said, and where it does not, vLLM's kernels are not batch-invariant for this
    model, and a difference is no fault of drafting."""
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
    """What happened in a case."""
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
    """How many outputs of the case `mixed` the plain engine does not repeat with other neighbours: half the batch,
    and the requests in reverse order."""
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
