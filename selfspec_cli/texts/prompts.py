"""The prompts of a workload: token ids, the same for every arm of a run. All but chat prompts have exactly the asked
length."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.texts import chat, library

if TYPE_CHECKING:
    from selfspec_cli.engine.live import Engine


def workload_prompts(cfg: RunConfig, engine: Engine) -> list[list[int]]:
    """`num_prompts` prompts of `input_len` token ids (chat prompts: at most), drawn by `cfg.seed`.

    Raises:
        ConfigError: prompt and output are longer than the model allows, the text is too short, or the model has no chat
            template.
    """
    work = cfg.workload
    if work.input_len + work.output_len > engine.max_model_len:
        raise ConfigError(
            f"workload.input_len={work.input_len} and workload.output_len={work.output_len}: together they must fit "
            f"the model's {engine.max_model_len} tokens"
        )
    if work.prompts == "random":
        draw = random.Random(cfg.seed)
        return [[draw.randrange(engine.vocab_size) for _ in range(work.input_len)] for _ in range(work.num_prompts)]
    if work.prompts == "chat":
        return _chat(cfg, engine)
    texts = library.prose_text() if work.prompts == "prose" else library.held_out_text()
    if work.prompts not in ("heldout", "prose"):
        texts = [(work.prompts, Path(work.prompts).read_text(encoding="utf-8"))]
    try:
        return library.token_windows(engine.encode, texts, work.input_len, work.num_prompts, cfg.seed)
    except ValueError as error:
        raise ConfigError(f"workload.prompts={work.prompts}: {error}") from error


def _chat(cfg: RunConfig, engine: Engine) -> list[list[int]]:
    work = cfg.workload
    found = [engine.chat(question) for question in chat.chosen(work.num_prompts, cfg.seed)]
    longest = max(map(len, found))
    if longest > work.input_len:
        raise ConfigError(f"workload.input_len={work.input_len}: the longest chat prompt has {longest} tokens; allow "
                          "them, or take the choice workload=chat")  # fmt: skip
    return found
