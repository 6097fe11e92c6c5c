"""Whether the cache keeps its promise on the 2,000 pairs of cache_pairs.py, and what one threshold for all would give.

    python experiments/gateway/cache_evaluation.py --orders 10 --out results/published/gateway_cache.json

Every question of the pairs is asked once, in a random order, of the real cache (`selfspec_cli.gateway.cache`: file,
index, guards, thresholds, promise). An answer is the question's meaning, so the verdict of an audit is known, and so is
whether a hit was wrong. Beside it, of the same orders: every single threshold on the cosine from 0.60 to 1.00, with and
without the same guards, of which the one with the most hits among those with a share of wrong hits of at most delta is
shown. It is chosen with hindsight, which no cache has; the promised cache starts with nothing and pays for its audits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from cache_pairs import PAIRS, SEED, SPLITS, Pair, Question, all_pairs, pairs_of
from scipy.stats import beta

from selfspec_cli.gateway.cache import AnswerCache, CacheRequest
from selfspec_cli.gateway.cache.embedding import MiniLM
from selfspec_cli.gateway.cache.guards import difference
from selfspec_cli.gateway.cache.vectors import NEAREST
from selfspec_cli.gateway.settings import CacheOptions

THRESHOLDS = np.concatenate(
    [np.arange(0.60, 0.95, 0.01), np.arange(0.95, 0.99, 0.002), np.arange(0.99, 1.0001, 0.0005)]
)


def interval(wrong: int, hits: int) -> list[float] | None:
    """The 95 % Clopper-Pearson interval of a share; None without hits."""
    if not hits:
        return None
    low = beta.ppf(0.025, wrong, hits - wrong + 1) if wrong else 0.0
    high = beta.ppf(0.975, wrong + 1, hits - wrong) if wrong < hits else 1.0
    return [round(float(low), 5), round(float(high), 5)]


def questions_and_splits(pairs: list[Pair]) -> tuple[list[Question], dict[str, str]]:
    """Every question once, and the split that its text comes from."""
    found, splits = {}, {}
    for pair in pairs:
        for question in (pair.cached, pair.asked):
            found[question.text] = question
            splits[question.text] = pair.split
    return list(found.values()), splits


def earlier(count: int, measured: set[str]) -> list[Question]:
    """Questions of `count` further pairs of the same families that the measured ones do not have, each once."""
    found: dict[str, Question] = {}
    for split in SPLITS if count else ():
        for pair in pairs_of(split, count // len(SPLITS), seed=SEED + 1):
            found.update({one.text: one for one in (pair.cached, pair.asked) if one.text not in measured})
    return list(found.values())


def guards_on_pairs(pairs: list[Pair]) -> dict[str, dict[str, dict[str, int]]]:
    """Of each split and kind of change, how many pairs there are and at how many a guard objects."""
    table: dict[str, dict[str, dict[str, int]]] = {}
    for pair in pairs:
        row = table.setdefault(pair.split, {}).setdefault(pair.kind, {"pairs": 0, "guarded": 0})
        row["pairs"] += 1
        row["guarded"] += difference(pair.cached.text, pair.asked.text) is not None
    return table


async def promised(
    order: list[Question], measured: set[str], vectors: dict[str, np.ndarray], options: CacheOptions
) -> dict[str, Any]:
    """Ask the questions of the real cache; how many hits the measured ones had, and which were wrong."""
    hits: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    opened = None
    with tempfile.TemporaryDirectory() as folder:
        cache = AnswerCache(
            Path(folder) / "cache.sqlite", options, embed=lambda texts: [vectors[text] for text in texts]
        )
        for number, question in enumerate(order):
            truth = "/".join(question.meaning)
            request = CacheRequest("", "m", "/v1/completions", prompt=question.text, wants="meaning", now=float(number))
            hit = await cache.lookup(request)
            if hit is None:
                choice = {"index": 0, "text": truth, "finish_reason": "stop"}
                await cache.store(request, [orjson.dumps({"object": "text_completion", "choices": [choice]})], {})
                if opened is None and cache.stats()["tenants"][""]["open"]:
                    opened = number
                continue
            if question.text not in measured:
                continue
            hits[question.text] += 1
            if hit.answer["choices"][0]["text"] != truth:
                wrong.append({"asked": question.text, "cached": hit.answer["choices"][0]["text"]})
        state = cache.stats()["tenants"][""]
        cache.close()
    return {"hits": dict(hits), "wrong": wrong, "opened_at_request": opened, **state}


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """The places of the `count` largest values, largest first."""
    if len(values) > count:
        places = np.argpartition(values, -count)[-count:]
        return places[np.argsort(-values[places])]
    return np.argsort(-values)


class Static:
    """A cache with one threshold on the cosine, fast enough to try every threshold."""

    def __init__(self, questions: list[Question], vectors: dict[str, np.ndarray]) -> None:
        table = np.stack([vectors[question.text] for question in questions])
        self._questions, self._cosines = questions, table @ table.T
        self._differ = lru_cache(maxsize=None)(
            lambda i, j: difference(questions[i].text, questions[j].text) is not None
        )

    def run(self, order: list[int], first: int, threshold: float, guarded: bool) -> tuple[int, int]:
        """(hits, wrong hits) of one order, from its question number `first` on."""
        stored, hits, wrong = np.empty(len(order), dtype=int), 0, 0
        count = 0
        for number, asked in enumerate(order):
            cosines = self._cosines[asked, stored[:count]]
            near = _largest(cosines, NEAREST if guarded else 1)
            fits = (int(stored[k]) for k in near if cosines[k] >= threshold)
            found = next((entry for entry in fits if not (guarded and self._differ(asked, entry))), None)
            if found is None:
                stored[count] = asked
                count += 1
            elif number >= first:
                hits += 1
                wrong += self._questions[found].meaning != self._questions[asked].meaning
        return hits, wrong

    def best(self, order: list[int], first: int, delta: float, guarded: bool) -> dict[str, Any] | None:
        """The threshold with the most hits among those with at most delta wrong; None if there is none with a hit."""
        tried = [(float(t), *self.run(order, first, t, guarded)) for t in THRESHOLDS]
        kept = [row for row in tried if row[1] and row[2] <= delta * row[1]]
        if not kept:
            return None
        threshold, hits, wrong = max(kept, key=lambda row: row[1])
        return {"threshold": round(threshold, 4), "hits": hits, "wrong": wrong}


def encoded(texts: list[str], file: Path | None) -> dict[str, np.ndarray]:
    """Text -> unit vector; kept in `file` for the next time, if one is named."""
    if file is not None and file.exists():
        kept = np.load(file, allow_pickle=False)
        if kept["texts"].tolist() == texts:
            return dict(zip(texts, kept["vectors"], strict=True))
    encoder, rows = MiniLM(), []
    for start in range(0, len(texts), 64):
        rows += [vector for vector in encoder(texts[start : start + 64]) if vector is not None]
    if file is not None:
        np.savez(file, texts=np.array(texts), vectors=np.stack(rows))
    return dict(zip(texts, rows, strict=True))


def repeats(order: list[Question], first: int) -> int:
    """How many questions from number `first` on mean what an earlier one meant: no cache has more right hits."""
    seen: set[tuple[str, ...]] = set()
    count = 0
    for number, question in enumerate(order):
        count += number >= first and question.meaning in seen
        seen.add(question.meaning)
    return count


def run(pairs: list[Pair], seeds: range, before: int, options: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """The whole evaluation, in plain values.

    Args:
        seeds: of the orders.
        before: pairs whose questions are asked before the measured ones.
        file: keeps the vectors of the questions.
    """
    measured, splits = questions_and_splits(pairs)
    previous = earlier(before, set(splits))
    questions = [*previous, *measured]
    vectors = encoded([question.text for question in questions], file)
    static = Static(questions, vectors)
    rows = []
    for seed in seeds:
        rng, first = random.Random(seed), len(previous)
        order = [*rng.sample(range(first), first), *rng.sample(range(first, len(questions)), len(measured))]
        asked = [questions[i] for i in order]
        ours = asyncio.run(promised(asked, set(splits), vectors, CacheOptions(**options, seed=seed)))
        hits, wrong = sum(ours["hits"].values()), len(ours["wrong"])
        by_split = {
            split: {
                "hits": sum(n for text, n in ours["hits"].items() if splits[text] == split),
                "wrong": sum(splits[one["asked"]] == split for one in ours["wrong"]),
            }
            for split in sorted(set(splits.values()))
        }
        row = {
            "seed": seed, "asked_before": first, "requests": len(measured), "repeats": repeats(asked, first),
            "hits": hits, "wrong": wrong, "wrong_share": wrong / hits if hits else None,
            "interval": interval(wrong, hits), "by_split": by_split, "wrong_hits": ours["wrong"],
            "opened_at_request": ours["opened_at_request"], "open_at_end": ours["open"],
            "audits": ours["audits"], "wrong_audits": ours["wrong_audits"],
            "one_threshold": static.best(order, first, options["delta"], False),
            "one_threshold_and_guards": static.best(order, first, options["delta"], True),
        }  # fmt: skip
        rows.append(row)
        print(line(row), flush=True)
    return {"options": options, "pairs": len(pairs), "before": before, "guards": guards_on_pairs(pairs), "orders": rows}


def line(row: dict[str, Any]) -> str:
    """One order as a line of the table."""

    def best(one: dict[str, Any] | None) -> str:
        return "     none" if one is None else f"{one['hits']:>4} @{one['threshold']:.3f}"

    share = ""
    if row["interval"] is not None:
        low, high = row["interval"]
        share = f"{100 * row['wrong_share']:.2f} % ({100 * low:.2f}..{100 * high:.2f})"
    opened = "-" if row["opened_at_request"] is None else row["opened_at_request"]
    ours = f"{row['seed']:>5} {row['repeats']:>7} {row['hits']:>5} {row['wrong']:>5} {share:<20} {opened:>6}"
    audits = f"{row['audits']:>6} {row['wrong_audits']:>5}"
    return f"{ours} {audits}   {best(row['one_threshold']):<10}  {best(row['one_threshold_and_guards'])}"


HEAD = "order repeats  hits wrong share (95 %)         opened audits wrong   one thr.    one thr. + guards"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--orders", type=int, default=10)
    parser.add_argument("--delta", type=float, default=0.01)
    parser.add_argument("--audit", type=float, default=0.05)
    parser.add_argument("--first", type=int, default=0, help="seed of the first order")
    parser.add_argument("--before", type=int, default=0, help="pairs whose questions are asked before, unmeasured")
    parser.add_argument("--split", choices=SPLITS, help="2,000 pairs of one split alone, for work on the guards")
    parser.add_argument("--vectors", type=Path, help="an .npz file that keeps the vectors of the questions")
    parser.add_argument("--add", action="store_true", help="to the orders that --out has")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    pairs = all_pairs() if args.split is None else pairs_of(args.split, PAIRS)
    print(HEAD)
    options = {"delta": args.delta, "alpha": 0.05, "audit": args.audit}
    result = run(pairs, range(args.first, args.first + args.orders), args.before, options, args.vectors)
    if args.add and args.out and args.out.exists():
        result["orders"] = json.loads(args.out.read_text(encoding="utf-8"))["orders"] + result["orders"]
    hits, wrong = (sum(row[name] for row in result["orders"]) for name in ("hits", "wrong"))
    share = f"{100 * wrong / hits:.3f} %, interval of all {interval(wrong, hits)}" if hits else "no hits"
    print(
        f"all orders: {hits} hits, {wrong} wrong ({share}; orders share their questions, so the interval is too narrow)"
    )
    for split, kinds in result["guards"].items():
        print(
            f"guards, {split}: " + ", ".join(f"{kind} {row['guarded']}/{row['pairs']}" for kind, row in kinds.items())
        )
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"written: {args.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
