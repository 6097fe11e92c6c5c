"""Sampled requests: the arm's against the plain engine's, and the plain engine's against themselves.

Every request has a seed of its own, and no two samples share one, so that all texts are independent draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from selfspec_cli.engine import requests as asking
from selfspec_cli.engine.live import Engine
from selfspec_cli.engine.requests import Request
from selfspec_cli.stages.verify import distribution
from selfspec_cli.stages.verify.distribution import ALPHA, Sample
from selfspec_cli.stages.verify.verdict import ENDED

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.8, top-k 40, top-p 0.95": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "penalties": {
        "temperature": 1.0,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
    },
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1.5": {"temperature": 1.5},
    "top-k 5": {"temperature": 1.0, "top_k": 5},
    "top-p 0.8": {"temperature": 1.0, "top_p": 0.8},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
}
QUICK = ("temperature 1", "temperature 0.8, top-k 40, top-p 0.95", "penalties", "min-p 0.05")
PROMPT, BATCH = 4, 32  # tokens and requests: a wave's prompts fit one step of any engine of verify's
EXACT_VOCABULARY, TRIPLES = 64, 40  # up to so many tokens pairs of tokens are enumerated, and triples


@dataclass(frozen=True)
class Drawn:
    """One setting's texts; refused: why vLLM takes no such request, in its own words. ended: with what error the engine
    ended over them, or before them."""

    sample: Sample | None
    refused: str | None = None
    ended: str | None = None


def draw(engine: Engine, prompt: list[int], name: str, count: int, tokens: int, first_seed: int) -> Drawn:
    """`count` texts of `tokens` tokens after one prompt, with seeds from first_seed on."""
    params = SETTINGS[name] | {"logprobs": 0}
    refused = asking.refused(engine, Request(prompt, 1, SETTINGS[name]))
    if refused is not None:
        return Drawn(None, refused)
    batch = min(BATCH, engine.cfg.engine.max_num_seqs)
    asked = [Request(prompt, tokens, params | {"seed": first_seed + number}) for number in range(count)]
    found = asking.answers(engine, asked, batch=batch, waves=True)
    scores = np.array([np.mean(one.scores or [0.0]) for one in found])
    return Drawn(Sample(np.array([one.tokens for one in found]), scores))


def exact(engine: Engine, prompt: list[int], name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Probabilities of the first two or three tokens after `prompt`, from the plain engine's distributions of the next
    token, and which of these texts have a token that is tied at the cut; None for large vocabularies and penalties."""
    params = SETTINGS[name]
    if engine.vocab_size > EXACT_VOCABULARY or "penalty" in " ".join(params):
        return None
    size = engine.vocab_size
    joint, tied = np.ones(()), np.zeros((), bool)  # [V] * m after m rounds
    for length in range(2 if size > TRIPLES else 3):
        prefixes = [[*prompt, *text] for text in product(range(size), repeat=length)]
        given = asking.next_distribution(engine, prefixes)
        found = [distribution.processed(one, params) for one in given]
        cut = [distribution.at_the_cut(*pair) for pair in zip(given, found, strict=True)]
        joint = joint[..., None] * np.reshape(found, (*joint.shape, size))
        tied = tied[..., None] | np.reshape(cut, (*tied.shape, size))
    return joint, tied


def judge(
    name: str, ours: Drawn, plain: Sequence[Drawn], known: tuple[np.ndarray, np.ndarray] | None
) -> dict[str, Any]:
    """One row of the document. plain: two samples of the plain engine. known: what `exact` found.

    verdict: "same", "differs", "refused" (vLLM takes no such request with drafts), "not shown" (the plain engine's own
    samples differ), ENDED (the arm's engine did).
    """
    row: dict[str, Any] = {"name": name}
    if ours.ended is not None:
        return row | {"verdict": ENDED, "note": ours.ended}
    if ours.sample is None or plain[0].sample is None or plain[1].sample is None:
        return row | {"verdict": "refused", "note": ours.refused or plain[0].refused}
    one, other = plain[0].sample, plain[1].sample
    seen, floor = distribution.compare(ours.sample, one), distribution.compare(one, other)
    least = distribution.detectable(one, other)
    found = seen | {"p_plain": floor["p"], "distance_plain": floor["distance"]}
    row |= {"texts": len(one.tokens), "tokens": one.tokens.shape[1], "detectable_share": least}
    row |= {name: float(f"{value:.3g}") for name, value in found.items()}
    p = seen["p"]
    if known is not None:
        ps = [distribution.exact_p(sample.tokens, *known) for sample in (ours.sample, one)]
        row |= {"p_exact": ps[0], "p_exact_plain": ps[1]}
        p = min(p, 1.0 if ps[0] is None else ps[0])
    if floor["p"] < ALPHA:
        return row | {"verdict": "not shown", "note": "two samples of the plain engine differ from each other"}
    if least is None:
        if len(np.unique(np.concatenate([one.tokens, other.tokens]), axis=0)) > 1:
            return row | {"verdict": "not shown", "note": "so few texts tell nothing"}
        row["note"] = "the plain engine draws one text every time, so only a text that differs from it could be noticed"
    return row | {"verdict": "differs" if p < ALPHA else "same"}
