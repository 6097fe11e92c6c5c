"""Chat prompts: questions through the model's template, other ones for another seed."""

import ast
from types import SimpleNamespace

import pytest

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.engine.live import Engine
from selfspec_cli.texts import chat
from selfspec_cli.texts.prompts import workload_prompts


class Tokenizer:
    chat_template = "{{ messages }}"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return "<user>" + messages[0]["content"] + "<assistant>"

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def engine(cfg, tokenizer):
    model = SimpleNamespace(max_model_len=4096, get_vocab_size=lambda: 256)
    return Engine(SimpleNamespace(get_tokenizer=lambda: tokenizer, model_config=model), cfg, 4, 0.0, 0.0, 0.0)


def asked(cfg):
    return ["".join(map(chr, prompt)) for prompt in workload_prompts(cfg, engine(cfg, Tokenizer()))]


@pytest.mark.parametrize("kind", ["chat", "coding", "edits"])
def test_questions_are_asked_through_the_template_and_chosen_by_name(kind):
    words = [f"workload={kind}", "workload.input_len=4000", "workload.output_len=64", "workload.num_prompts=16"]
    texts = asked(compose_runs(overrides=words, sweep=False)[0])
    assert texts == [f"<user>{question}<assistant>" for question in chat.chosen(16, 0, kind)]
    assert len(set(texts)) == 16
    assert kind == "chat" or not set(chat.chosen(16, 0, kind)) & set(chat.chosen(16, 0))


def test_questions_are_distinct_and_another_seed_asks_others():
    assert len(set(chat.QUESTIONS)) == len(chat.QUESTIONS)
    first, second = chat.chosen(16, 0), chat.chosen(32, 1)
    assert not set(first) & set(second) and len(set(second)) == 32
    assert chat.chosen(60, 0)[48:] == chat.chosen(12, 0)


def test_a_model_without_a_template_and_a_prompt_that_is_too_long_are_refused():
    cfg = compose_runs(overrides=["workload=chat", "workload.input_len=20"], sweep=False)[0]
    with pytest.raises(ConfigError, match=r"no chat template.* take workload.prompts=heldout"):
        workload_prompts(cfg, engine(cfg, SimpleNamespace(chat_template=None)))
    with pytest.raises(ConfigError, match=r"workload.input_len=20: the longest chat prompt has \d+ tokens"):
        asked(cfg)


def test_an_edit_names_one_change_and_shows_the_function():
    found = chat.edits()
    assert len(found) > 100
    for request in found:
        source = request.split("```python\n")[1].split("\n```")[0]
        (function,) = compile(source, "edit", "exec", flags=ast.PyCF_ONLY_AST).body
        assert chat.EDITED_LINES[0] <= len(source.splitlines()) <= chat.EDITED_LINES[1]
        assert request.endswith("Answer with the whole function.")
        if "_renamed" in request:
            assert f"`{function.name}_renamed`" in request


def test_questions_about_files_fill_the_prompt_with_code_and_begin_apart():
    overrides = ["workload=files", "workload.input_len=2000", "workload.batch=8", "workload.output_len=64"]
    texts = asked(compose_runs(overrides=overrides, sweep=False)[0])
    assert len(texts) == 8 and all(1900 <= len(text) <= 2000 for text in texts)
    beginnings = {text.split("```python\n")[1][:200] for text in texts}
    assert len(beginnings) == 8, "no two may share their keys and values"
    assert [text.removesuffix("<assistant>").split("\n```\n\n")[-1] for text in texts] == [*chat.ABOUT_FILES]
