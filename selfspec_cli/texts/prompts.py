"""The prompts of a workload: token ids, the same for every arm of a run. All but chat prompts, and those of a file of
prompts, have exactly the asked length."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Protocol

from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.texts import chat, library, prompt_files


class Tokens(Protocol):
    """What prompts need of an engine, or of whatever else knows a model's tokenizer."""

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have together."""

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to this, exclusive."""

    @property
    def has_template(self) -> bool:
        """Whether `chat` can be asked."""

    def encode(self, text: str) -> list[int]:
        """Text -> token ids, without special tokens."""

    def chat(self, question: str) -> list[int]:
        """A user's question in the model's chat template -> token ids."""


def workload_prompts(cfg: RunConfig, engine: Tokens) -> list[list[int]]:
    """`num_prompts` prompts of `input_len` token ids (chat prompts and those of a file of prompts: at most, and of a
    shorter file all of them), drawn by `cfg.seed`.

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
    """(name, text) of what `workload.prompts` says to cut windows from: heldout, prose, or a file of text."""
    if prompts == "prose":
        return library.prose_text()
    if prompts == "heldout":
        return library.held_out_text()
    return [(prompts, Path(prompts).read_text(encoding="utf-8"))]


def file_prompts(cfg: RunConfig) -> list[prompt_files.Prompt]:
    """The prompts that a config draws from a file of prompts, with their categories; raises ConfigError."""
    found = prompt_files.read(cfg.workload.prompts, cfg.load.column, cfg.load.category)
    return prompt_files.drawn(found, cfg.workload.num_prompts, cfg.seed)


def _chat(cfg: RunConfig, engine: Tokens) -> list[list[int]]:
    work = cfg.workload
    found = chat.asked(work.prompts, work.num_prompts, cfg.seed, engine.chat, work.input_len)
    longest = max(map(len, found))
    if longest > work.input_len:
        raise ConfigError(f"workload.input_len={work.input_len}: the longest {work.prompts} prompt has {longest} "
                          f"tokens; allow them, or take the choice workload={work.prompts}")  # fmt: skip
    return found
