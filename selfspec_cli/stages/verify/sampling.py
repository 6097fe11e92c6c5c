"""Sampled requests: are two samples of short texts from one distribution, and is a sample from this distribution?

Every request has a seed of its own, and no two samples share one, so that all texts are independent draws. Two
statistics are compared with what they are when the samples' labels are dealt out at random (a permutation test): a
table of which tokens stand where and follow which, and the mean log-probability that the model gives to a text, which
tells a sampler that is too sharp or too flat from few texts. Both must hold up, so the smaller p-value counts twice.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from scipy import stats

from selfspec_cli.engine import requests as asking
from selfspec_cli.engine.live import Engine
from selfspec_cli.engine.requests import Request
from selfspec_cli.stages.verify.verdict import ENDED

ALPHA = 1e-4
"""A p-value below it is a fault: twenty runs of a right engine give a false alarm one or two times in a hundred."""

DRAWS, MORE_DRAWS = 999, 24_000  # permutations at first, and where the first p-value is small; enough for ALPHA
LEAST = 5  # a cell of the table is one of its own if so many texts have it
POWER, SIMULATED = 0.9, 60
SHARES = (0.01, 0.02, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Sample:
    """Texts [n, length] and the log-probability (nats) of each, the mean of its tokens' by the unprocessed model."""

    tokens: np.ndarray
    scores: np.ndarray


def compare(ours: Sample, theirs: Sample, seed: int = 0) -> dict[str, float]:
    """Permutation test of two samples of equal size. p: of one distribution for both; p_table, p_scores: of its parts.
    distance: total variation between tokens at a place, mean over places. shift: of a token's mean log-probability."""
    cells, scores = _cells(ours, theirs), np.concatenate([ours.scores, theirs.scores])
    n = len(ours.tokens)
    labels = np.concatenate([np.ones(n), -np.ones(n)])[None]
    seen = _table_statistic(labels, cells)[0], _score_statistic(labels, scores)[0]
    draw = np.random.default_rng(seed)
    p_table, p_scores = _p_values(seen, cells, scores, DRAWS, draw)
    if min(p_table, p_scores) < 0.02:
        p_table, p_scores = _p_values(seen, cells, scores, MORE_DRAWS, draw)
    return {
        "p": min(1.0, 2 * min(p_table, p_scores)),
        "p_table": p_table,
        "p_scores": p_scores,
        "distance": distance(ours.tokens, theirs.tokens),
        "shift": float(ours.scores.mean() - theirs.scores.mean()),
    }


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Total variation between the distributions of the tokens at a place, mean over places."""
    gaps = []
    for place in range(ours.shape[1]):
        one, other = Counter(ours[:, place].tolist()), Counter(theirs[:, place].tolist())
        gaps.append(sum(abs(one[token] / len(ours) - other[token] / len(theirs)) for token in one | other) / 2)
    return float(np.mean(gaps))


def _cells(ours: Sample, theirs: Sample) -> np.ndarray:
    """[2n, cells] of 0 and 1: which token stands where, and which pairs of tokens; rare ones of a place together."""
    tokens = np.concatenate([ours.tokens, theirs.tokens])
    columns = []
    for place in range(tokens.shape[1]):
        for first in {place, max(place - 1, 0)}:
            known = [tuple(row) for row in tokens[:, first : place + 1].tolist()]
            common = {key: at for at, key in enumerate(k for k, count in Counter(known).items() if count >= LEAST)}
            table = np.zeros((len(known), len(common) + 1), dtype=np.float32)
            table[np.arange(len(known)), [common.get(key, len(common)) for key in known]] = 1
            columns.append(table)
    joined = np.concatenate(columns, 1)
    return joined[:, joined.sum(0) > 0]


def _table_statistic(labels: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Chi-square of two samples, summed over the tables. labels: [draws, 2n] of 1 and -1."""
    return ((labels.astype(np.float32) @ cells) ** 2 / cells.sum(0)).sum(1)


def _score_statistic(labels: np.ndarray, scores: np.ndarray) -> np.ndarray:
    return np.abs(labels @ (scores - scores.mean()))


def _permuted(n: int, draws: int, draw: np.random.Generator) -> np.ndarray:
    labels = np.tile(np.concatenate([np.ones(n, np.int8), -np.ones(n, np.int8)]), (draws, 1))
    return draw.permuted(labels, axis=1)


def _p_values(
    seen: tuple[float, float], cells: np.ndarray, scores: np.ndarray, draws: int, draw: np.random.Generator
) -> tuple[float, float]:
    reached, done = [0, 0], 0
    while done < draws:
        labels = _permuted(len(scores) // 2, min(1000, draws - done), draw)
        drawn = _table_statistic(labels, cells), _score_statistic(labels.astype(float), scores)
        for at in range(2):  # a hair's breadth, for sums in another order
            reached[at] += int((drawn[at] >= seen[at] * (1 - 1e-6)).sum())
        done += len(labels)
        if min(reached) >= 20:  # neither can become small any more
            break
    return (1 + reached[0]) / (1 + done), (1 + reached[1]) / (1 + done)


def detectable(first: Sample, second: Sample) -> float | None:
    """The power of `compare`: the least share of texts that a fault would have to replace by the likeliest one, to be
    found (p below ALPHA) in nine of ten runs; None: not even all. first, second: samples of a right engine, from which
    runs are drawn. Critical values are of gamma and normal distributions with the moments of permutations."""
    draw = np.random.default_rng(0)
    n, cells, scores = len(first.tokens), _cells(first, second), np.concatenate([first.scores, second.scores])
    permuted = _table_statistic(_permuted(n, 200, draw), cells)
    mean, spread = float(permuted.mean()), float(permuted.var())
    if not (mean and spread and scores.std()):
        return None  # all texts are alike
    critical_table = stats.gamma.isf(ALPHA / 2, mean**2 / spread, scale=spread / mean)
    best = int(scores.argmax())
    for share in SHARES:
        found = 0
        for _ in range(SIMULATED):
            rows = draw.integers(0, 2 * n, 2 * n)
            rows[:n][draw.random(n) < share] = best
            ours, theirs = cells[rows[:n]].sum(0), cells[rows[n:]].sum(0)
            table = ((ours - theirs) ** 2 / np.maximum(ours + theirs, 1)).sum()
            drawn = scores[rows]
            shift = abs(drawn[:n].sum() - drawn[n:].sum()) / max(drawn.std() * np.sqrt(2 * n), 1e-9)
            found += bool(table > critical_table or shift > stats.norm.isf(ALPHA / 4))
        if found >= POWER * SIMULATED:
            return share
    return None


def exact_p(tokens: np.ndarray, probabilities: np.ndarray, tied: np.ndarray | None = None) -> float | None:
    """P-value (chi-square) that texts [n, m] follow probabilities [V] * m; None for fewer than three cells. Cells of
    fewer than five expected texts count as one, as do tied ones ([V] * m, texts of which a token is `at_the_cut`)."""
    counts = np.zeros(probabilities.shape)
    np.add.at(counts, tuple(tokens[:, : probabilities.ndim].T), 1)
    tied = np.zeros(probabilities.shape, bool) if tied is None else tied
    if counts[(probabilities <= 0) & ~tied].any():
        return 0.0
    expected = probabilities.ravel() * len(tokens)
    enough = (expected >= 5) & ~tied.ravel()
    pairs = [np.append(values[enough], values[~enough].sum()) for values in (counts.ravel(), expected)]
    kept = pairs[1] > 0
    if kept.sum() < 3:
        return None
    return float(stats.chisquare(pairs[0][kept], pairs[1][kept]).pvalue)


def processed(log_probabilities: Sequence[float], params: dict[str, Any]) -> np.ndarray:
    """Probabilities [V] after temperature, min-p, top-k and top-p, in that order, as vLLM applies them."""
    logits = np.asarray(log_probabilities, dtype=np.float64) / params.get("temperature", 1.0)
    order = np.argsort(-logits)
    if params.get("min_p", 0.0) > 0:
        logits[logits < logits.max() + np.log(params["min_p"])] = -np.inf
    if params.get("top_k", 0) > 0:
        logits[order[params["top_k"] :]] = -np.inf
    found = np.exp(logits - logits.max())
    found /= found.sum()
    if params.get("top_p", 1.0) < 1.0:
        before = np.cumsum(found[order]) - found[order]
        found[order[before >= params["top_p"]]] = 0.0
        found /= found.sum()
    return found


def at_the_cut(log_probabilities: Sequence[float], probabilities: np.ndarray) -> np.ndarray:
    """Tokens [V] that are tied, some of which `processed` has kept: vLLM may keep others. 16 bits make many ties."""
    given, kept = np.asarray(log_probabilities), probabilities > 0
    among = given == given[kept].min()
    return among & ~kept[among].all()


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
    """One setting's texts. refused: vLLM's reason to take no such request. ended: the error that ended the engine."""

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
        found = [processed(one, params) for one in given]
        cut = [at_the_cut(*pair) for pair in zip(given, found, strict=True)]
        joint = joint[..., None] * np.reshape(found, (*joint.shape, size))
        tied = tied[..., None] | np.reshape(cut, (*tied.shape, size))
    return joint, tied


def judge(
    name: str, ours: Drawn, plain: Sequence[Drawn], known: tuple[np.ndarray, np.ndarray] | None
) -> dict[str, Any]:
    """One row of the document. plain: two samples of the plain engine. known: what `exact` found. verdict: "same",
    "differs", "refused" (by vLLM, with drafts), "not shown" (the plain engine's own samples differ), ENDED."""
    row: dict[str, Any] = {"name": name}
    if ours.ended is not None:
        return row | {"verdict": ENDED, "note": ours.ended}
    if ours.sample is None or plain[0].sample is None or plain[1].sample is None:
        return row | {"verdict": "refused", "note": ours.refused or plain[0].refused}
    one, other = plain[0].sample, plain[1].sample
    seen, floor = compare(ours.sample, one), compare(one, other)
    least = detectable(one, other)
    found = seen | {"p_plain": floor["p"], "distance_plain": floor["distance"]}
    row |= {"texts": len(one.tokens), "tokens": one.tokens.shape[1], "detectable_share": least}
    row |= {name: float(f"{value:.3g}") for name, value in found.items()}
    p = seen["p"]
    if known is not None:
        ps = [exact_p(sample.tokens, *known) for sample in (ours.sample, one)]
        row |= {"p_exact": ps[0], "p_exact_plain": ps[1]}
        p = min(p, 1.0 if ps[0] is None else ps[0])
    if floor["p"] < ALPHA:
        return row | {"verdict": "not shown", "note": "two samples of the plain engine differ from each other"}
    if least is None:
        if len(np.unique(np.concatenate([one.tokens, other.tokens]), axis=0)) > 1:
            return row | {"verdict": "not shown", "note": "so few texts tell nothing"}
        row["note"] = "the plain engine draws one text every time, so only a text that differs from it could be noticed"
    return row | {"verdict": "differs" if p < ALPHA else "same"}
