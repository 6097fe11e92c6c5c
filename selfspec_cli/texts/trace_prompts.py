"""Prompts for the requests of a trace, which names lengths and shared blocks, but no text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from selfspec_cli.load_patterns.trace import Request
from selfspec_cli.texts import library

BLOCK = 512  # tokens of a block of Mooncake's traces


def of_requests(
    requests: Sequence[Request], encode: Callable[[str], list[int]], seed: int, most: int, unit: int = 1
) -> list[list[int]]:
    """Return a prompt of held-out code for each request, of its length, cut to the first `most` tokens.

    Blocks with equal ids are equal in all prompts; what a request has no ids for is its own.

    Args:
        unit: ids that `encode` gives for a token of the trace.
    """
    pool = [token for _, text in library.held_out_text() for token in encode(text)]
    size = unit * BLOCK

    def block(name: str) -> list[int]:
        start = random.Random(f"{seed} {name}").randrange(max(1, len(pool) - size))
        return pool[start : start + size]

    prompts = []
    for number, request in enumerate(requests):
        length = min(request.input_len, most)
        names = [f"block {name}" for name in request.blocks[: -(-length // BLOCK)]]
        names += [f"request {number}, {place}" for place in range(len(names), -(-length // BLOCK))]
        prompts.append([token for name in names for token in block(name)][: unit * length])
    return prompts
