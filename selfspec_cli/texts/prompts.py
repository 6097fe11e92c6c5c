"""The prompts of a workload as token ids, equal for every arm of a run, and what they need to know of a model.

Prompts have exactly `input_len` tokens, except chat prompts and prompts from a file.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.texts import library, prompt_files, questions
from selfspec_cli.texts.prompt_files import Prompt

Turn = list[int] | Callable[[Sequence[list[int]]], list[int]]
"""The token ids of a request, or what makes them of the outputs of the turns before it, which directly precede it."""


class Tokens:
    """A model's tokenizer: an engine's, or one that was read from the model's files. cfg: of the model."""

    cfg: RunConfig

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have together."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to this, exclusive."""
        raise NotImplementedError

    @property
    def tokenizer(self) -> Any:
        """As transformers has it."""
        raise NotImplementedError

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode(self, text: str) -> list[int]:
        """Text -> token ids, without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def chat(
        self, question: str | Sequence[str], tools: Sequence[Mapping[str, Any]] = (), system: str = ""
    ) -> list[int]:
        """The token ids of a user's question, or of what user and model said in turn, by the model's chat template;
        raises ConfigError without one. tools: functions to call, in words in the system message if the template passes
        over them. system: its message, which is before the question if the template refuses one."""
        if not self.has_template:
            raise ConfigError(questions.no_template(self.cfg.model.name))
        said = [question] if isinstance(question, str) else question
        messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
        if tools:
            text = self._templated(messages, system, tools=list(tools))
            if text != self._templated(messages, system):  # else the template passes over functions
                return self.encode(text)
        return self.encode(self._templated(messages, prompt_files.in_words(tools, system)))

    def _templated(self, messages: list[dict[str, str]], system: str, **more: Any) -> str:
        from jinja2 import TemplateError

        render = partial(self.tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True, **more)
        if not system:
            return str(render(messages))
        try:
            return str(render([{"role": "system", "content": system}, *messages]))
        except TemplateError:
            first = {"role": "user", "content": f"{system}\n\n{messages[0]['content']}"}
            return str(render([first, *messages[1:]]))

    def answer(self, ids: Sequence[int]) -> str:
        """The text of an output up to its first special token: what follows an end that was ignored is no answer."""
        special = set(self.tokenizer.all_special_ids)
        end = next((place for place, token in enumerate(ids) if token in special), len(ids))
        return str(self.tokenizer.decode(list(ids[:end])))


def workload_prompts(cfg: RunConfig, engine: Tokens) -> list[list[int]]:
    """Draw `num_prompts` prompts of `input_len` token ids by `cfg.seed`; chat prompts and prompts from a file may be
    shorter, and a file may have fewer. Raises ConfigError: no room, no chat template, or too little text."""
    check_length(cfg, engine)
    work = cfg.workload
    if work.prompts == "random":
        draw = random.Random(cfg.seed)
        return [[draw.randrange(engine.vocab_size) for _ in range(work.input_len)] for _ in range(work.num_prompts)]
    if work.prompts in questions.KINDS:
        prompts = questions.asked(work.prompts, work.num_prompts, cfg.seed, engine.chat, work.input_len)
        longest = max(map(len, prompts))
        if longest > work.input_len:
            raise ConfigError(
                f"workload.input_len={work.input_len}: the longest {work.prompts} prompt has {longest} "
                f"tokens; allow them, or take the choice workload={work.prompts}"
            )
        return prompts
    if prompt_files.is_prompt_file(work.prompts):
        template = engine.chat if engine.has_template else None
        return prompt_files.encoded(file_prompts(cfg), engine.encode, template, work.input_len)
    try:
        if work.prompts == "prose":
            texts = library.prose_text()
        elif work.prompts == "heldout":
            texts = library.held_out_text()
        else:
            texts = [(work.prompts, Path(work.prompts).read_text(encoding="utf-8"))]
        return library.token_windows(engine.encode, texts, work.input_len, work.num_prompts, cfg.seed)
    except ValueError as error:  # too little text, or none
        raise ConfigError(f"workload.prompts={work.prompts}: {error}") from error


def check_length(cfg: RunConfig, engine: Tokens) -> None:
    """Refuse a workload whose prompt and output together are longer than the model allows; raises ConfigError."""
    work = cfg.workload
    if work.input_len + work.output_len > engine.max_model_len:
        raise ConfigError(
            f"workload.input_len={work.input_len} and workload.output_len={work.output_len}: together they must fit "
            f"the model's {engine.max_model_len} tokens"
        )


def workload_turns(cfg: RunConfig, engine: Tokens) -> tuple[list[Turn], list[str]]:
    """Return the requests of `workload_prompts`, each followed by its question's later turns, and each one's category
    (none without any); raises ConfigError. A later turn that is too long for the model loses its beginning."""
    first: list[Turn] = [*workload_prompts(cfg, engine)]
    if not prompt_files.is_prompt_file(cfg.workload.prompts):
        return first, []
    turns: list[Turn] = []
    categories: list[str] = []
    for prompt, ids in zip(file_prompts(cfg), first, strict=True):
        turns += [ids, *[partial(_later_turn, engine, prompt, cfg.workload.output_len)] * len(prompt.later)]
        categories += [prompt.category] * (1 + len(prompt.later))
    return turns, categories if any(categories) else []


def _later_turn(engine: Tokens, prompt: Prompt, output_len: int, outputs: Sequence[list[int]]) -> list[int]:
    """Return the token ids of the turn that follows `outputs`, with everything that was said before it."""
    in_template = prompt.chat and engine.has_template
    said = [prompt.text if in_template else prompt.words]
    for output, question in zip(outputs, prompt.later, strict=False):
        said += [engine.answer(output), question]
    ids = prompt.put_into(engine.chat)(said) if in_template else engine.encode("\n".join(said))
    return ids[-(engine.max_model_len - output_len) :]


def file_prompts(cfg: RunConfig) -> list[Prompt]:
    """Draw the prompts of a config from its file of prompts, with their categories; raises ConfigError."""
    prompts = prompt_files.read(cfg.workload.prompts, cfg.load.column)
    return prompt_files.drawn(prompts, cfg.workload.num_prompts, cfg.seed)
