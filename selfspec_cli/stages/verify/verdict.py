"""What a run of `selfspec verify` found, its verdict, and which kind of fault the evidence points to. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from selfspec_cli.early_exit.counters import VerifyCounts

LOSSLESS, NEAR_TIES, NOT_SHOWN, FAULT = "lossless", "near-ties only", "not shown", "fault"
BEST_FIRST = (LOSSLESS, NEAR_TIES, NOT_SHOWN, FAULT)
PASSING = (LOSSLESS, NEAR_TIES)
ENDED = "engine ended"  # of a way to sample: the engine that drafts ended with an error

KINDS = {
    "kv_slot": "a draft corrupts keys or values of tokens that count",
    "accept_one_more": "a token is accepted that the model would not have chosen",
    "other_request": "the drafts of a request depend on the other requests in the batch: the drafter reads another "
    "request's cache",
    "biased_sampler": "greedy output is right and sampled output has another distribution: the sampler is biased",
    "foreign_head": "the exit head agrees with this model far less often than it did where it was fitted: it belongs "
    "to another model",
    "gate_changes_output": "the output changes where a gate ends drafts",
    "stale_after_preemption": "the output changes after a preemption: something of a request is kept that is stale",
}
"""Kinds of fault, named by what is seen. Each can be planted (`--plant`)."""

PLAIN_DIFFERS = "plain vLLM does not repeat its own outputs"

PLANTED_FOR_PROOF = ("accept_one_more", "biased_sampler")
"""What every run plants in its engine first: faults of the verify pass, which is the same whatever drafts."""

Row = Mapping[str, Any]


def kinds_of(method: str) -> tuple[str, ...]:
    """The kinds of fault that can be planted in an engine that drafts by a method."""
    return tuple(KINDS) if method == "layer_skip" else PLANTED_FOR_PROOF


def suspect(document: Mapping[str, Any]) -> str | None:
    """The kind of fault that explains what was found; None where nothing was."""
    faulty = {row["name"] for row in document["cases"] if row["verdict"] == FAULT}
    gated = {name for name in faulty if name.startswith("gate ") or name == "changing"}
    ungated = faulty - gated - {"cache", "preempted"}
    if document["gate"] != "none" and "gate none" not in faulty:
        gated, ungated = gated | ungated, set()
    gated -= {"gate none"}
    drafts, head = (document[name] or {} for name in ("own_drafts", "head"))
    rules = (
        ("kv_slot", ungated and "cache" in faulty),
        ("accept_one_more", ungated),
        ("gate_changes_output", gated),
        ("stale_after_preemption", "preempted" in faulty),
        ("kv_slot", "cache" in faulty),
        ("other_request", drafts.get("verdict") == FAULT),
        ("biased_sampler", any(row["verdict"] == "differs" for row in document["sampling"])),
        ("foreign_head", head.get("verdict") == FAULT),
    )
    return next((name for name, holds in rules if holds), None)


def decide(document: Mapping[str, Any]) -> tuple[str, str]:
    """(verdict, why) of a run. A pass needs that planted faults were caught, drafts accepted, and no case left open."""
    missed = [name for name, proof in document["proof"].items() if not proof["caught"]]
    kind = suspect(document)
    if ended := [row for row in document["sampling"] if row["verdict"] == ENDED]:
        return FAULT, f"the engine that drafts ended over requests with {ended[0]['name']}: {ended[0]['note']}"
    if missed:
        return NOT_SHOWN, f"the run did not catch what it planted itself ({', '.join(missed)}), so it shows nothing"
    if kind is not None:
        return FAULT, f"{KINDS[kind]} ({kind})"
    if not document["drafted"]:
        return NOT_SHOWN, "no draft was made"
    if not document["accepted"]:
        return NOT_SHOWN, f"of {document['drafted']} drafted tokens none was accepted"
    open_cases = [row["name"] for row in [*document["cases"], *document["sampling"]] if row["verdict"] == NOT_SHOWN]
    if any(row.get("plain_differs") for row in document["cases"]):
        return NOT_SHOWN, f"{PLAIN_DIFFERS}, so differences say nothing of drafting; left open: {', '.join(open_cases)}"
    if open_cases:
        return NOT_SHOWN, f"left open: {', '.join(open_cases)}; see their notes"
    if any(row["verdict"] == NEAR_TIES for row in document["cases"]):
        return NEAR_TIES, "where outputs part, the plain engine holds both tokens level"
    return (
        LOSSLESS,
        "every greedy output is the plain engine's, and no sampled one is distinguishable from its distribution",
    )


def case_row(
    kinds: Sequence[str], compared: int, unlike_scores: int, plain: Mapping[str, int], batch_invariant: bool
) -> tuple[str, str | None]:
    """(verdict, note) of a greedy case. kinds: near-tie or fault, of each of the `compared` requests that differs; in
    batch-invariant mode a near-tie is wrong too. unlike_scores: requests with other log-probabilities. plain: outputs
    that the plain engine does not repeat (differ, of compared), and near-ties among them (near_ties)."""
    wrong = len(kinds) if batch_invariant else sum(kind == "fault" for kind in kinds)
    plain_wrong = plain["differ"] - (0 if batch_invariant else plain["near_ties"])
    if wrong and plain_wrong and not surely_more(wrong, compared, plain_wrong, plain["compared"]):
        return NOT_SHOWN, (
            f"{PLAIN_DIFFERS} with other neighbours ({plain_wrong} of {plain['compared']} differ), "
            f"and the arm's {wrong} of {compared} are no more"
        )
    if wrong:
        return FAULT, None
    if unlike_scores:
        return FAULT, f"{unlike_scores} request(s) report log-probabilities that are not the plain engine's"
    return (NEAR_TIES, None) if kinds else (LOSSLESS, None)


def not_invariant(differ: int, turned: int, compared: int, together: Mapping[str, int], k: int) -> str | None:
    """Why differences of a case in batch-invariant mode are vLLM's own; None where they may be the arm's. differ:
    outputs of `compared` that differ; turned: those where the plain engine, asked again, chooses the arm's token.
    together: its own outputs (differ, of compared) that it would not choose when tokens come k + 1 at a time."""
    if turned == differ:
        return f"{PLAIN_DIFFERS}: asked again for the same {differ} prefixes, it chooses the arm's tokens"
    seen = max((turned, compared), (together["differ"], together["compared"]), key=lambda one: one[0] / max(one[1], 1))
    if not seen[0] or surely_more(differ, compared, *seen):
        return None
    apart = f"{together['differ']} of {together['compared']} differ"
    return (
        f"{PLAIN_DIFFERS} when tokens come {k + 1} at a time ({apart}), and at {turned} of the arm's {differ} "
        "differences it chooses the arm's token"
    )


def surely_more(ours: int, of_ours: int, plain: int, of_plain: int) -> bool:
    """Whether the arm parts more often than the plain engine from itself: one-sided Fisher test at 1 in 1000."""
    from scipy.stats import fisher_exact

    table = [[ours, of_ours - ours], [plain, of_plain - plain]]
    return bool(fisher_exact(table, alternative="greater").pvalue < 1e-3)


def own_drafts(alone: VerifyCounts, company: VerifyCounts, exact: bool) -> dict[str, Any]:
    """Whether requests are drafted for alike alone and in company, by accepted tokens a round. exact: arithmetic does
    not depend on the batch: the two are equal but for single rounds; else rates may differ as of other texts."""
    (rate, variance), (other, other_variance) = _rate(alone), _rate(company)
    bound = 0.05 * rate + 0.01 if exact else max(0.15 * rate, 3 * math.sqrt(variance + other_variance))
    return {"alone": round(rate, 4), "company": round(other, 4), "verdict": FAULT if rate - other > bound else "same"}


def _rate(counts: VerifyCounts) -> tuple[float, float]:
    """Mean of the accepted tokens a round, and the variance of that mean."""
    rounds = max(counts.rounds, 1)
    mean = counts.accepted / rounds
    square = sum((2 * place + 1) * count for place, count in enumerate(counts.accepted_at)) / rounds
    return mean, max(square - mean**2, 0.0) / rounds


def head(claimed: float | None, counts: VerifyCounts | None) -> dict[str, Any] | None:
    """Whether a fitted head agrees with this model as it did where it was fitted: the first draft of a round is
    accepted at least a third as often. claimed: that agreement, None where the head's file does not say."""
    if claimed is None or counts is None or counts.rounds < 50:
        return None
    measured = counts.accepted_at[0] / counts.rounds
    verdict = FAULT if claimed >= 0.1 and measured < claimed / 3 else "same"
    return {"agreement_when_fitted": round(claimed, 4), "first_drafts_accepted": round(measured, 4), "verdict": verdict}
