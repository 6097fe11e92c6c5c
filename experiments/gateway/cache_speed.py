"""How long a look-up takes in a full cache: index, file, guards and decision; and apart from it, the encoder.

    python experiments/gateway/cache_speed.py --entries 100000 --lookups 500

Run it on a quiet machine. The entries are questions made of the words of cache_pairs.py with random unit vectors
around common centres, so that every search finds neighbours and every look-up reads texts and asks the guards. The
look-ups are new questions near to entries; each goes through `AnswerCache.lookup`, with an encoder that already knows
the vectors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from cache_pairs import all_pairs

from selfspec_cli.gateway.cache import AnswerCache, CacheRequest
from selfspec_cli.gateway.cache.embedding import DIMENSIONS, MiniLM
from selfspec_cli.gateway.cache.storage import Entry, Storage
from selfspec_cli.gateway.settings import CacheOptions

ANSWER = (
    b'{"object": "text_completion", "choices": [{"index": 0, "text": "' + b"x" * 800 + b'", "finish_reason": "stop"}]}'
)


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Median, 99th percentile and largest, in milliseconds."""
    ordered = sorted(1000 * second for second in seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50_ms": round(statistics.median(ordered), 3), "p99_ms": round(p99, 3), "max_ms": round(ordered[-1], 3)}


def filled(path: Path, texts: list[str], vectors: np.ndarray, scope: bytes) -> None:
    """A cache's file with one entry a text."""
    storage = Storage(path)
    for number, (text, vector) in enumerate(zip(texts, vectors, strict=True), 1):
        key = number.to_bytes(32, "big")
        storage.put(Entry(number, key, "", scope, text, ANSWER, vector, 0.0, 0.0, 1e12))
    storage.close()


async def looked_up(cache: AnswerCache, texts: list[str]) -> list[float]:
    """Seconds of each look-up."""
    seconds = []
    for text in texts:
        began = time.perf_counter()
        await cache.lookup(CacheRequest("", "m", "/v1/completions", prompt=text, wants="meaning", now=1.0))
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--lookups", type=int, default=500)
    args = parser.parse_args()
    rng, words = np.random.default_rng(0), random.Random(0)
    questions = [pair.asked.text for pair in all_pairs()]
    centres = rng.standard_normal((args.entries // 10 + 1, DIMENSIONS))
    count = args.entries + args.lookups
    vectors = centres[rng.integers(len(centres), size=count)] + 0.5 * rng.standard_normal((count, DIMENSIONS))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    texts = [f"{words.choice(questions)} Case {number}." for number in range(count)]
    asked = dict(zip(texts[args.entries :], vectors[args.entries :], strict=True))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.sqlite"
        scope = CacheRequest("", "m", "/v1/completions", prompt="x").scope
        began = time.perf_counter()
        filled(path, texts[: args.entries], vectors[: args.entries], scope)
        wrote = time.perf_counter() - began
        began = time.perf_counter()
        cache = AnswerCache(
            path, CacheOptions(entries=10 * args.entries), embed=lambda some: [asked[text] for text in some]
        )
        opened = time.perf_counter() - began
        every = list(asked)
        asyncio.run(looked_up(cache, every[:20]))  # imports, and the first page of the file
        seconds = asyncio.run(looked_up(cache, every[20:]))
        stats = cache.stats()
        cache.close()
    encoder, one = MiniLM(), []
    encoder(questions[:1])
    for question in questions[:100]:
        began = time.perf_counter()
        encoder([question])
        one.append(time.perf_counter() - began)
    guarded = sum(number for name, number in stats.items() if name.startswith("guarded"))
    result = {
        "entries": args.entries, "lookups": len(seconds), "vectors": stats["vectors"], "texts_guarded": guarded,
        "lookup_without_encoder": quantiles(seconds), "encoder_one_question": quantiles(one),
        "write_entries_s": round(wrote, 1), "open_and_build_index_s": round(opened, 1),
    }  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
