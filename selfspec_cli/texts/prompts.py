"""The prompts of a workload as token ids, equal for every arm of a run.

Prompts have exactly `input_len` tokens, except chat prompts and prompts from a file.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Protocol

from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.texts import chat, library, prompt_files


class Tokens(Protocol):
    """An engine, or another object that knows a model's tokenizer, as far as prompts need it."""

    @property
    def max_model_len(self) -> int:
        """Maximum of prompt and output together, in tokens."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, which begin at 0."""

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template, which `chat` needs."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""

    def chat(self, question: str) -> list[int]:
        """Return the token ids of a user's question in the model's chat template."""


def workload_prompts(cfg: RunConfig, engine: Tokens) -> list[list[int]]:
    """Draw `num_prompts` prompts of `input_len` token ids by `cfg.seed`.

    Chat prompts and prompts from a file have at most `input_len`; a shorter file gives all its prompts.

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
    if work.prompts in chat.KINDS:
        return _chat(cfg, engine)
    if prompt_files.is_prompt_file(work.prompts):
        template = engine.chat if engine.has_template else None
        return prompt_files.encoded(file_prompts(cfg), engine.encode, template, work.input_len)
    try:
        return library.token_windows(
            engine.encode, named_texts(work.prompts), work.input_len, work.num_prompts, cfg.seed
        )
    except ValueError as error:
        raise ConfigError(f"workload.prompts={work.prompts}: {error}") from error


def named_texts(prompts: str) -> list[tuple[str, str]]:
    """Return (name, text) of the texts for `workload.prompts`: heldout, prose, or a file of text."""
    if prompts == "prose":
        return library.prose_text()
    if prompts == "heldout":
        return library.held_out_text()
    return [(prompts, Path(prompts).read_text(encoding="utf-8"))]


def file_prompts(cfg: RunConfig) -> list[prompt_files.Prompt]:
    """Draw the prompts of a config from its file of prompts, with their categories; raises ConfigError."""
    prompts = prompt_files.read(cfg.workload.prompts, cfg.load.column)
    return prompt_files.drawn(prompts, cfg.workload.num_prompts, cfg.seed)


def _chat(cfg: RunConfig, engine: Tokens) -> list[list[int]]:
    work = cfg.workload
    prompts = chat.asked(work.prompts, work.num_prompts, cfg.seed, engine.chat, work.input_len)
    longest = max(map(len, prompts))
    if longest > work.input_len:
        raise ConfigError(
            f"workload.input_len={work.input_len}: the longest {work.prompts} prompt has {longest} "
            f"tokens; allow them, or take the choice workload={work.prompts}"
        )
    return prompts
