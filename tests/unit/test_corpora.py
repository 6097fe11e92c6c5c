"""Texts to fit on, to score and to ask from: what is read, what is held out, and what is refused."""

import json

import pytest
from commands import one
from refusals import said

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.extras import install
from selfspec_cli.texts import corpora, library

PARAGRAPHS = [f"Paragraph {number}. " + "Words that a model could read. " * 30 for number in range(400)]


def encode(text):
    return [ord(letter) % 97 for letter in text]


def test_a_conversation_is_a_document_to_score(tmp_path):
    turns = [[{"value": paragraph}, {"value": "Yes."}] for paragraph in PARAGRAPHS]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"conversations": one}) for one in [*turns[:3], [], *turns[3:]]))
    found = corpora.documents(str(path), 1000)
    assert [text for _, text in found] == [f"{paragraph}\n\nYes." for paragraph in PARAGRAPHS]  # no empty one
    assert corpora.documents(str(path), 7) == found[:7]
    held_out = corpora.documents(str(path), 1000, held_out=True)
    assert 0 < len(held_out) < len(found) / 5
    apart = "".join(text for _, text in corpora.load(str(path)).fitting)
    assert not any(text in apart for _, text in held_out)  # what no fit reads


def test_a_text_is_scored_in_blocks_and_the_library_in_modules(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(PARAGRAPHS))
    blocks = corpora.documents(str(path), 1000)
    assert "\n\n".join(text for _, text in blocks) == "\n\n".join(PARAGRAPHS)
    assert min(len(text) for _, text in blocks[:-1]) >= corpora.BLOCK
    found = corpora.load(str(path))
    assert corpora.documents(str(path), 1000, held_out=True)[0] == (f"{path} 0", found.held_out[0][1])
    assert found.name == str(path) and "\n\n".join(PARAGRAPHS[:3]) in found.held_out[0][1]
    assert corpora.documents("stdlib", 1000) == library.held_out_text()
    path.write_text(" \n\n ")
    for source, words in (("random", "no text"), (str(path), "no text to score"), ("gone.txt", "no such file")):
        assert words in said(ConfigError, corpora.documents, source, 10)


def test_what_repeats_the_held_out_modules_is_left_out(tmp_path):
    name, module = max(library.held_out_text(), key=lambda pair: len(pair[1]))
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join([*PARAGRAPHS, module]))
    found = corpora.load(str(path))
    line = max(module.splitlines(), key=len)
    assert not any(line in text for _, text in [*found.fitting, *found.held_out]), name


@pytest.mark.slow
def test_the_standard_library_is_the_default_text():
    found = corpora.load("stdlib")
    assert found.held_out == library.held_out_text()
    assert not {name for name, _ in found.fitting} & set(library.HELD_OUT)
    fitted = {text for _, text in found.fitting}
    prose = library.prose_text()  # English that no head is fitted on
    assert len(prose) > 20 and sum(len(text) for _, text in prose) > 100_000
    assert not any(text in fitted for _, text in prose)
    assert one("workload=prose").workload.prompts == "prose"
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
        ("binary.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("other.json", '{"a": 1}', "has no column 'text' or 'conversations'; columns: a"),
        ("broken.json", "[", "cannot be read as json"),
        ("bytes.json", b"\x93\xf0" * 500, "cannot be read"),
        ("short.parquet", b"PAR1xx", "cannot be read as parquet"),
        ("empty.jsonl", "", "too little text"),
        ("list.jsonl", '{"conversations": 3}', "neither text nor a ShareGPT conversation"),
        ("list.jsonl", '{"conversations": [{"role": "user"}]}', "neither text nor a ShareGPT conversation"),
    ],
)
def test_files_of_another_shape_are_refused(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert words in said(ConfigError, corpora.load, str(path))


def test_a_column_of_a_file_can_be_named(tmp_path):
    rows = [{"text": "short", "body": paragraph} for paragraph in PARAGRAPHS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        assert corpora.load(f"{tmp_path / name}:body").held_out[0][1].startswith(PARAGRAPHS[0])
        assert "no column 'title'; columns: text, body" in said(ConfigError, corpora.load, f"{tmp_path / name}:title")


def test_a_table_without_its_package_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.parquet").write_text("{}")
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    assert install("data") in said(ConfigError, corpora.load, "rows.parquet")


# ---- the standard library


def as_bytes(text):
    return list(text.encode())


def source(name, lines):
    return "".join(f"{name}_{i} = combine({name}, {i}, [{i * i}])\n" for i in range(lines))


def test_most_held_out_modules_exist_here_and_are_sources():
    texts = library.held_out_text()
    assert len(texts) >= 0.9 * len(library.HELD_OUT)
    assert all(len(text) > 2000 for _, text in texts)
    names = [name for name, _ in texts]
    assert names == [name for name in library.HELD_OUT if name in names]


def test_a_missing_module_is_left_out_and_a_package_gives_its_init(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "_stdlib", lambda: tmp_path)
    without_sources = said(FileNotFoundError, library.held_out_text)
    assert "argparse" in without_sources and tmp_path.name in without_sources
    (tmp_path / "argparse.py").write_text("a = 1\n")
    (tmp_path / "typing").mkdir()
    (tmp_path / "typing" / "__init__.py").write_text("b = 2\n")
    assert library.held_out_text() == [("argparse", "a = 1\n"), ("typing", "b = 2\n")]


def test_fitting_text_holds_nothing_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "_stdlib", lambda: tmp_path)
    held_out, other = source("held", 40), source("other", 40)
    kept = {"zeta.py": other, "json/scanner.py": source("scan", 40), "decoder.py": source("alone", 40)}
    dropped = {
        "json/decoder.py": source("json", 40),
        "copied.py": other + held_out,
        "test/test_zeta.py": source("test", 40),
        "site-packages/numpy.py": source("numpy", 40),
    }
    for name, text in {"argparse.py": held_out, **kept, **dropped}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    assert [name for name, _ in library.fitting_text()] == ["decoder", "json.scanner", "zeta"]


def test_copies_are_recognised_whatever_their_whitespace():
    prints = library.fingerprints([source("held", 100), "tiny = 1\n"])
    reindented = source("held", 100).replace("held_", "\n    held_")
    assert library.is_contaminated(reindented, prints)
    assert library.is_contaminated("\n\ntiny   = 1", prints), "too short for one window, but the same text"
    assert not library.is_contaminated(source("other", 100), prints)


def test_a_share_of_the_windows_decides():
    prints = library.fingerprints([source("held", 400)])
    quote = "".join(source("held", 400).splitlines(keepends=True)[50:60])  # 3 windows of 8 lines
    assert not library.is_contaminated(source("other", 400) + quote, prints)
    assert library.is_contaminated(source("other", 20) + quote, prints)
    assert library.is_contaminated(source("other", 4000) + source("held", 100), prints), "pasted into a giant"


def test_windows_are_exact_deterministic_and_begin_at_lines():
    texts = [(name, source(name, 60)) for name in ("alpha", "beta", "gamma")]
    windows = library.token_windows(as_bytes, texts, length=64, count=9, seed=5)
    assert windows == library.token_windows(as_bytes, texts, length=64, count=9, seed=5)
    assert windows != library.token_windows(as_bytes, texts, length=64, count=9, seed=6)
    assert all(len(window) == 64 for window in windows)
    begins = [bytes(window).split(b"_")[0].decode() for window in windows]
    assert sorted(begins) == ["alpha"] * 3 + ["beta"] * 3 + ["gamma"] * 3
    assert len({tuple(window) for window in windows}) == 9


def test_windows_use_every_place_and_then_say_what_is_missing():
    text = [("one", "abc\n\ndef\nghi\n")]
    assert len(library.token_windows(as_bytes, text, length=4, count=3, seed=0)) == 3
    with pytest.raises(ValueError, match=r"not enough text for 4 windows of 4 tokens.*hold 3"):
        library.token_windows(as_bytes, text, length=4, count=4, seed=0)
    assert "at least 1" in said(ValueError, library.token_windows, as_bytes, text, length=0, count=1, seed=0)
