"""What prompts need to know of a model: its tokenizer, its chat template and its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.texts import chat, tool_calls


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
        """A user's question -> the token ids of a prompt, by the model's own chat template, or ConfigError where it has
        none; or user and model in turn, of which the user begins and ends.

        tools: functions that the model may call; in words in the system message if the template passes over them.
        system: the system message; a template that refuses one has it at the beginning of the user's first turn.
        """
        if not self.has_template:
            raise ConfigError(chat.no_template(self.cfg.model.name))
        said = [question] if isinstance(question, str) else question
        messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
        if tools:
            text = self._templated(messages, system, tools=list(tools))
            if text != self._templated(messages, system):  # else the template passes over functions
                return self.encode(text)
        return self.encode(self._templated(messages, tool_calls.in_words(tools, system)))

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
