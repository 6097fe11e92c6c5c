"""Corpora by one word: what is read, what is held out, and what is refused."""

import json

import pytest

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.texts import corpora
from selfspec_cli.texts import library as corpus

PARAGRAPHS = [f"Paragraph {number}. " + "Words that a model could read. " * 30 for number in range(400)]


def encode(text):
    return [ord(letter) % 97 for letter in text]


def test_plain_text_is_split_into_disjoint_blocks(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(PARAGRAPHS))
    found = corpora.load(str(path))
    assert found.name == str(path)
    fitting, held_out = ({text for _, text in part} for part in (found.fitting, found.held_out))
    assert held_out and len(fitting) > 5 * len(held_out)
    assert not fitting & held_out
    assert "\n\n".join(PARAGRAPHS[:3]) in found.held_out[0][1]


def test_share_gpt_is_read_turn_by_turn(tmp_path):
    entries = [
        {"id": str(i), "conversations": [{"from": "human", "value": p}, {"from": "gpt", "value": "Yes."}]}
        for i, p in enumerate(PARAGRAPHS)
    ]
    (tmp_path / "chats.json").write_text(json.dumps(entries))
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, entries)))
    texts = [corpora.load(str(tmp_path / name)) for name in ("chats.json", "chats.jsonl")]
    assert [text for _, text in texts[0].fitting] == [text for _, text in texts[1].fitting]
    assert texts[0].held_out[0][1].startswith(PARAGRAPHS[0] + "\n\nYes.\n\n")


def test_what_repeats_the_held_out_modules_is_left_out(tmp_path):
    name, module = max(corpus.held_out_text(), key=lambda pair: len(pair[1]))
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join([*PARAGRAPHS, module]))
    found = corpora.load(str(path))
    line = max(module.splitlines(), key=len)
    assert not any(line in text for _, text in [*found.fitting, *found.held_out]), name


def test_the_standard_library_is_the_default_text():
    found = corpora.load("stdlib")
    assert found.held_out == corpus.held_out_text()
    assert not {name for name, _ in found.fitting} & set(corpus.HELD_OUT)
    counts = found.counts(encode, 97)
    assert corpora.COUNTED_CHARACTERS * 0.9 < counts.sum() <= corpora.COUNTED_CHARACTERS
    assert counts.argmax() == ord(" ")


def test_random_token_ids_say_that_they_are():
    found = corpora.load("random")
    assert "random" in found.name
    windows = found.windows("fitting", encode, 1000, 64, 8, seed=0)
    assert [len(window) for window in windows] == [64] * 8
    assert windows == found.windows("fitting", encode, 1000, 64, 8, seed=0)
    assert windows != found.windows("held_out", encode, 1000, 64, 8, seed=0)
    assert 0 <= min(map(min, windows)) and max(map(max, windows)) < 1000


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.txt", None, "no such file; allowed: stdlib, random"),
        ("short.txt", "A word.", "too little text"),
        ("other.json", '{"a": 1}', "is not ShareGPT"),
        ("broken.json", "[", "is not ShareGPT"),
        ("list.jsonl", '{"conversations": 3}', "is not ShareGPT"),
        ("binary.txt", b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_files_of_another_shape_are_refused(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=words):
        corpora.load(str(path))


def test_a_data_set_is_read_by_split_and_column(monkeypatch):
    asked = {}

    class Rows(list):
        column_names = ("text", "body")

    def load_dataset(name, split):
        asked.update(name=name, split=split)
        return Rows({"text": "short", "body": p} for p in PARAGRAPHS)

    stand_in(monkeypatch, load_dataset)
    found = corpora.load("hf:some/set:validation:body")
    assert asked == {"name": "some/set", "split": "validation"}
    assert PARAGRAPHS[0] in found.held_out[0][1]
    with pytest.raises(ConfigError, match="no column 'title'; columns: text, body"):
        corpora.load("hf:some/set:train:title")


def test_a_data_set_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        corpora.load("hf:some/set")


def stand_in(monkeypatch, load_dataset):
    import sys
    from types import ModuleType

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
