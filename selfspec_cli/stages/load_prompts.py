"""The prompts of a load test as a server is asked for them: token ids where the model is known, else text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.engine.arguments import ModelTokens
from selfspec_cli.engine.clients import CHAT
from selfspec_cli.load_patterns.trace import Request, asked_requests
from selfspec_cli.texts import chat, library, prompt_files
from selfspec_cli.texts.prompts import check_length, file_prompts, named_texts, workload_prompts

BLOCK = 512  # tokens of a block of Mooncake's traces
CHARACTERS = 4  # of a token, where nobody here knows the server's tokenizer


@dataclass(frozen=True)
class Prompts:
    """bodies: what each prompt says in the body of its request. categories: of each; empty where there are none.
    exact: every prompt has exactly `workload.input_len` tokens. cut: requests of a trace that are longer than
    `workload.input_len` or `workload.output_len`."""

    bodies: list[dict[str, Any]]
    categories: list[str]
    exact: bool
    cut: int = 0


def of_model(cfg: RunConfig) -> Prompts:
    """The prompts that every other command would give to the model of `cfg`, as token ids.

    Raises:
        ConfigError: as `workload_prompts`.
    """
    engine = ModelTokens(cfg)
    if cfg.load.trace is not None:
        check_length(cfg, engine)
        requests = asked_requests(cfg.load)
        prompts = of_requests(requests, engine.encode, cfg.seed, cfg.workload.input_len)
        return _of_trace(cfg, requests, [{"prompt": ids} for ids in prompts])
    tokens = workload_prompts(cfg, engine)
    bodies = [{"prompt": one} for one in tokens]
    return Prompts(_seeded(cfg, bodies), _categories(cfg), len({len(one) for one in tokens}) == 1)


def of_text(cfg: RunConfig, path: str) -> Prompts:
    """Prompts as text, for a server of which the tokenizer is not known: `workload.input_len` counts tokens of four
    characters.

    Args:
        path: of the API: completions or chats.

    Raises:
        ConfigError: the file cannot be read, the text is too short, or the prompts are random token ids.
    """
    work = cfg.workload
    if cfg.load.trace is not None:
        requests = asked_requests(cfg.load)
        letters = of_requests(requests, lambda text: [*map(ord, text)], cfg.seed, work.input_len, unit=CHARACTERS)
        return _of_trace(cfg, requests, _bodies(["".join(map(chr, prompt)) for prompt in letters], path))
    if work.prompts == "random":
        raise ConfigError(
            "workload.prompts=random with --url: token ids need the model; name it with model=..., or "
            "use heldout, chat, coding, edits, files or a file"
        )
    if work.prompts in chat.KINDS:
        most = CHARACTERS * work.input_len
        asked = chat.asked(work.prompts, work.num_prompts, cfg.seed, lambda text: [*map(ord, text)], most)
        texts = ["".join(map(chr, one)) for one in asked]
    elif prompt_files.is_prompt_file(work.prompts):
        texts = [prompt.words[: CHARACTERS * work.input_len] for prompt in file_prompts(cfg)]
    else:
        texts = _windows(cfg)
    return Prompts(_seeded(cfg, _bodies(texts, path)), _categories(cfg), False)


def _bodies(texts: Sequence[str], path: str) -> list[dict[str, Any]]:
    if path == CHAT:
        return [{"messages": [{"role": "user", "content": text}]} for text in texts]
    return [{"prompt": text} for text in texts]


def _of_trace(cfg: RunConfig, requests: Sequence[Request], bodies: Sequence[dict[str, Any]]) -> Prompts:
    """Prompts whose answers have the trace's lengths."""
    work = cfg.workload
    limited = [
        body | {"max_tokens": min(request.output_len, work.output_len)}
        for request, body in zip(requests, bodies, strict=True)
    ]
    cut = sum(request.input_len > work.input_len or request.output_len > work.output_len for request in requests)
    return Prompts(_seeded(cfg, limited), [], False, cut)


def _windows(cfg: RunConfig) -> list[str]:
    work = cfg.workload
    named, length = named_texts(work.prompts), CHARACTERS * work.input_len
    try:
        windows = library.token_windows(
            lambda text: [*map(ord, text)], named, length, work.num_prompts, cfg.seed, "characters"
        )
    except ValueError as error:
        raise ConfigError(
            f"workload.prompts={work.prompts}: {error} (num_prompts={work.num_prompts}; {CHARACTERS} for each token of "
            f"input_len={work.input_len}); a .jsonl file holds prompts one by one, such as "
            '{"prompt": "..."} on each line'
        ) from error
    return ["".join(map(chr, window)) for window in windows]


def _seeded(cfg: RunConfig, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sampled requests have a seed each, so that both sides and every repeat draw alike."""
    if cfg.workload.temperature == 0:
        return list(bodies)
    return [body | {"seed": cfg.seed + number} for number, body in enumerate(bodies)]


def _categories(cfg: RunConfig) -> list[str]:
    if not prompt_files.is_prompt_file(cfg.workload.prompts):
        return []
    found = [prompt.category for prompt in file_prompts(cfg)]
    return found if any(found) else []


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
