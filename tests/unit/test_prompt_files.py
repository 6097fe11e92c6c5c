"""Prompts from the rows of files: known shapes of rows, alternating categories, and messages about other rows."""

import json
from collections import Counter

import pytest

from selfspec_cli.config.schema import ConfigError, LoadConfig, RunConfig, WorkloadConfig
from selfspec_cli.texts import prompt_files
from selfspec_cli.texts.prompt_files import Prompt, drawn, encoded, read
from selfspec_cli.texts.prompts import workload_prompts

SHAREGPT = [
    {"id": "a", "conversations": [{"from": "gpt", "value": "hello"}, {"from": "human", "value": "first"}]},
    {"id": "b", "conversations": [{"from": "human", "value": "second"}, {"from": "gpt", "value": "x"}]},
    {"id": "c", "conversations": []},
]
SPEC_BENCH = [{"question_id": 1, "category": "qa", "turns": ["one", "two"]}, {"question_id": 2, "turns": ["three"]}]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_sharegpt_is_asked_what_its_user_says_first(tmp_path):
    (tmp_path / "share.json").write_text(json.dumps(SHAREGPT))
    assert read(str(tmp_path / "share.json")) == [Prompt("first", "", True), Prompt("second", "", True)]


def test_benchmarks_have_first_turns_and_categories(tmp_path):
    assert read(jsonl(tmp_path / "q.jsonl", SPEC_BENCH)) == [Prompt("one", "qa", True), Prompt("three", "", True)]
    messages = [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "kind": "k"}]
    assert read(jsonl(tmp_path / "m.jsonl", messages), category="kind") == [Prompt("u", "k", True)]


def test_rows_of_text_are_no_chats_and_a_column_can_be_named(tmp_path):
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": "p", "answer": "a"}])
    assert read(file) == [Prompt("p")]
    assert read(file, column="answer") == [Prompt("a")]


def test_parquet(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    pandas.DataFrame({"turns": [["a", "b"], ["c"]], "category": ["x", "y"]}).to_parquet(tmp_path / "q.parquet")
    assert read(str(tmp_path / "q.parquet")) == [Prompt("a", "x", True), Prompt("c", "y", True)]


@pytest.mark.parametrize(
    ("text", "column", "said"),
    [
        ('{"prompt": "a"', None, "cannot be read as jsonl"),
        ('{"other": "a"}', None, "its columns: other"),
        ('{"prompt": "a"}', "other", "load.column=other is not in a row; its columns: prompt"),
        ('{"prompt": "  "}', None, "it holds no prompt"),
        ("3", None, "a row is no mapping"),
        ("", None, "it holds no prompt"),
    ],
)
def test_files_of_another_shape_are_named(tmp_path, text, column, said):
    (tmp_path / "q.jsonl").write_text(text)
    with pytest.raises(ConfigError) as error:
        read(str(tmp_path / "q.jsonl"), column)
    assert said in str(error.value) and "q.jsonl" in str(error.value)


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


def test_a_workload_takes_its_prompts_from_the_file(tmp_path):
    class Tokens:
        max_model_len, vocab_size, has_template = 1000, 256, False

        def encode(self, text):
            return [*text.encode()]

    file = jsonl(tmp_path / "q.jsonl", SPEC_BENCH)
    work = WorkloadConfig(input_len=4, output_len=4, num_prompts=2, prompts=file)
    found = workload_prompts(RunConfig(workload=work, load=LoadConfig(clients=1)), Tokens())
    assert sorted(found) == sorted([[*b"one"], [*b"thre"]])
    assert prompt_files.is_prompt_file(file) and not prompt_files.is_prompt_file("notes.txt")
