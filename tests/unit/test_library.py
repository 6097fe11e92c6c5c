"""The held-out text: the same on every machine, kept apart from the fitting text, drawn the same for a seed."""

from pathlib import Path

import pytest

from selfspec_cli.texts import library


def encode(text: str) -> list[int]:
    return list(text.encode())


def source(name: str, lines: int) -> str:
    return "".join(f"{name}_{i} = combine({name}, {i}, [{i * i}])\n" for i in range(lines))


def test_most_held_out_modules_exist_here_and_are_sources() -> None:
    texts = library.held_out_text()
    assert len(texts) >= 0.9 * len(library.HELD_OUT)
    assert all(len(text) > 2000 for _, text in texts)
    names = [name for name, _ in texts]
    assert names == [name for name in library.HELD_OUT if name in names]


def test_a_missing_module_is_left_out_and_a_package_gives_its_init(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(library, "_stdlib", lambda: tmp_path)
    (tmp_path / "argparse.py").write_text("a = 1\n")
    (tmp_path / "typing").mkdir()
    (tmp_path / "typing" / "__init__.py").write_text("b = 2\n")
    assert library.held_out_text() == [("argparse", "a = 1\n"), ("typing", "b = 2\n")]


def test_python_without_sources_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(library, "_stdlib", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match=f"argparse.*{tmp_path.name}"):
        library.held_out_text()


def test_fitting_text_holds_nothing_held_out(tmp_path: Path, monkeypatch) -> None:
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


def test_copies_are_recognised_whatever_their_whitespace() -> None:
    prints = library.fingerprints([source("held", 100), "tiny = 1\n"])
    reindented = source("held", 100).replace("held_", "\n    held_")
    assert library.is_contaminated(reindented, prints)
    assert library.is_contaminated("\n\ntiny   = 1", prints), "too short for one window, but the same text"
    assert not library.is_contaminated(source("other", 100), prints)


def test_a_share_of_the_windows_decides() -> None:
    prints = library.fingerprints([source("held", 400)])
    quote = "".join(source("held", 400).splitlines(keepends=True)[50:60])  # 3 windows of 8 lines
    assert not library.is_contaminated(source("other", 400) + quote, prints)
    assert library.is_contaminated(source("other", 20) + quote, prints)
    assert library.is_contaminated(source("other", 4000) + source("held", 100), prints), "pasted into a giant"


def test_windows_are_exact_deterministic_and_begin_at_lines() -> None:
    texts = [(name, source(name, 60)) for name in ("alpha", "beta", "gamma")]
    windows = library.token_windows(encode, texts, length=64, count=9, seed=5)
    assert windows == library.token_windows(encode, texts, length=64, count=9, seed=5)
    assert windows != library.token_windows(encode, texts, length=64, count=9, seed=6)
    assert all(len(window) == 64 for window in windows)
    begins = [bytes(window).split(b"_")[0].decode() for window in windows]
    assert sorted(begins) == ["alpha"] * 3 + ["beta"] * 3 + ["gamma"] * 3
    assert len({tuple(window) for window in windows}) == 9


def test_windows_use_every_place_and_then_say_what_is_missing() -> None:
    text = [("one", "abc\n\ndef\nghi\n")]
    assert len(library.token_windows(encode, text, length=4, count=3, seed=0)) == 3
    with pytest.raises(ValueError, match=r"not enough text for 4 windows of 4 tokens.*hold 3"):
        library.token_windows(encode, text, length=4, count=4, seed=0)
    with pytest.raises(ValueError, match="at least 1"):
        library.token_windows(encode, text, length=0, count=1, seed=0)
