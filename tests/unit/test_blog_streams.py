"""The animation of docs/blog/early_exit.md shows the run that is published, and nothing else."""

import importlib.util
import json
from pathlib import Path

import pytest

from selfspec_cli.record import archive, folder

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "published" / "blog.jsonl.xz"
PICTURE = ROOT / "docs" / "blog" / "streams.svg"


def script():
    spec = importlib.util.spec_from_file_location("streams", ROOT / "experiments" / "blog" / "streams.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_long_lines_are_broken_and_every_piece_keeps_its_time():
    steps = [
        {"seconds": 0.5, "tokens": 1, "text": "a" * 60},
        {"seconds": 1.0, "tokens": 4, "text": " = 1\n    b"},
    ]
    streams = script()
    placed = streams.laid_out("x = 2\n", steps)
    assert placed[0] == (0, 0, "x = 2", 0.0, 0)
    assert [(row, column) for row, column, *_ in placed[1:]] == [(1, 0), (2, 0), (2, 8), (3, 0)]
    assert "".join(piece for _, _, piece, seconds, _ in placed if seconds == 0.5) == "a" * 60
    assert {tokens for *_, seconds, tokens in placed if seconds == 1.0} == {3}


def test_the_page_says_how_long_the_streams_took():
    text = (ROOT / "docs" / "blog" / "early_exit.md").read_text(encoding="utf-8")
    picture = PICTURE.read_text(encoding="utf-8")
    for seconds in ("1.89 s", "1.04 s"):
        assert seconds in text and f"in {seconds}" in picture


@pytest.mark.slow
def test_the_picture_is_that_of_the_published_run(tmp_path):
    """A text or a number of outputs that is not the run's ends `recorded` with an error."""
    streams = script()
    points, warnings = folder.read(RESULTS)
    assert not warnings
    found = streams.recorded(points, 0)
    assert streams.drawn(found) == PICTURE.read_text(encoding="utf-8")
    rounds = len(found["arms"]["early_exit"]["steps"])
    assert rounds < len(found["arms"]["baseline"]["steps"]) == 128


def test_the_picture_of_the_larger_model_is_that_of_its_recording(tmp_path):
    text = archive.read_text(RESULTS / "streams_qwen.json")
    (tmp_path / "streams.json").write_text(text, encoding="utf-8")
    streams = script()
    picture = PICTURE.with_name("streams_qwen.svg").read_text(encoding="utf-8")
    assert streams.drawn(streams.read(tmp_path / "streams.json")) == picture
    assert "0.59 s (plain decoding) and 0.24 s" in picture


def recording(tmp_path, last=" = 1"):
    """A file of record.py, of two outputs a side."""
    plain = [{"seconds": 0.1, "tokens": 1, "text": "x"}, {"seconds": 0.4, "tokens": 2, "text": " = 1"}]
    early = [{"seconds": 0.1, "tokens": 1, "text": "x"}, {"seconds": 0.2, "tokens": 2, "text": last}]
    arms = {name: {"id": name, "steps": steps} for name, steps in (("early_exit", early), ("baseline", plain))}
    file = tmp_path / "streams.json"
    file.write_text(json.dumps({"prompt": "def f():\n", "title": "4-bit copies", "slower": 20, "arms": arms}))
    return file


def test_a_recording_is_drawn_as_much_slower_as_it_says(tmp_path):
    streams = script()
    picture = streams.drawn(streams.read(recording(tmp_path)))
    assert "0.40 s (plain decoding) and 0.20 s (4-bit copies)" in picture
    assert 'dur="11.00s"' in picture and "shown 20 times slower" in picture  # 0.4 s, and a pause of 3 s
    assert f"0;{0.1 * 20 / 11:.5f};" in picture


def test_two_texts_that_differ_are_not_drawn(tmp_path):
    with pytest.raises(SystemExit, match="the same text twice"):
        script().read(recording(tmp_path, last=" = 2"))
