"""The prompts of a load test as a server is asked for them: token ids."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec_cli.config.schema import RunConfig
from selfspec_cli.engine.arguments import ModelTokens
from selfspec_cli.load_patterns.trace import Request, asked_requests
from selfspec_cli.texts import library, prompt_files
from selfspec_cli.texts.prompts import check_length, file_prompts, workload_prompts

BLOCK = 512  # tokens of a block of Mooncake's traces


@dataclass(frozen=True)
class Prompts:
    """bodies: what each prompt says in the body of its request. categories: of each; empty where there are none. cut:
    requests of a trace that are longer than `workload.input_len` or `workload.output_len`."""

    bodies: list[dict[str, Any]]
    categories: list[str]
    cut: int = 0


def of_model(cfg: RunConfig) -> Prompts:
    """The prompts that every other command would give to the model of `cfg`, as token ids; raises ConfigError."""
    engine, work = ModelTokens(cfg), cfg.workload
    if cfg.load.trace is None:
        bodies: list[dict[str, Any]] = [{"prompt": ids} for ids in workload_prompts(cfg, engine)]
        named = file_prompts(cfg) if prompt_files.is_prompt_file(work.prompts) else []
        categories = [prompt.category for prompt in named]
        return Prompts(_seeded(cfg, bodies), categories if any(categories) else [])
    check_length(cfg, engine)
    requests = asked_requests(cfg.load)
    prompts = of_requests(requests, engine.encode, cfg.seed, work.input_len)
    bodies = [
        {"prompt": ids, "max_tokens": min(request.output_len, work.output_len)}
        for ids, request in zip(prompts, requests, strict=True)
    ]
    cut = sum(request.input_len > work.input_len or request.output_len > work.output_len for request in requests)
    return Prompts(_seeded(cfg, bodies), [], cut)


def _seeded(cfg: RunConfig, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sampled requests have a seed each, so that both sides and every repeat draw alike."""
    if cfg.workload.temperature == 0:
        return list(bodies)
    return [body | {"seed": cfg.seed + number} for number, body in enumerate(bodies)]


def of_requests(
    requests: Sequence[Request], encode: Callable[[str], list[int]], seed: int, most: int
) -> list[list[int]]:
    """Return a prompt of held-out code for each request, of its length, cut to the first `most` tokens.

    Blocks with equal ids are equal in all prompts; what a request has no ids for is its own.
    """
    pool = [token for _, text in library.held_out_text() for token in encode(text)]

    def block(name: str) -> list[int]:
        start = random.Random(f"{seed} {name}").randrange(max(1, len(pool) - BLOCK))
        return pool[start : start + BLOCK]

    prompts = []
    for number, request in enumerate(requests):
        length = min(request.input_len, most)
        names = [f"block {name}" for name in request.blocks[: -(-length // BLOCK)]]
        names += [f"request {number}, {place}" for place in range(len(names), -(-length // BLOCK))]
        prompts.append([token for name in names for token in block(name)][:length])
    return prompts
