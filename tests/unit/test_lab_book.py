"""results/LOG.md: every entry has a question, a setup, a result, a verdict and a file that is there, in eight lines."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from scripts import importable

ROOT = Path(__file__).parents[2]
LINES = 8
FILE = re.compile(r"`([\w.*-]+(?:/[\w.*-]+)*)`")


def entries(text):
    """Heading -> lines of each entry, the heading among them."""
    parts = [re.split(r"^## ", part, flags=re.M)[0] for part in re.split(r"^(?=### )", text, flags=re.M)[1:]]
    return {part.splitlines()[0].removeprefix("### "): part.rstrip().splitlines() for part in parts}


def faults(heading, lines, there):
    """What is wrong with an entry. there(name): whether a file or folder of that name is published or in the tree."""
    text = "\n".join(lines)
    if not heading.endswith("?"):
        yield "is no question"
    if len(lines) > LINES:
        yield f"has {len(lines)} lines"
    wanted = [r"^- Setup: ", r"^- Result[^:\n]*: ", r"^- Verdict: "]
    places = [match.start() if (match := re.search(part, text, re.M)) else -1 for part in wanted]
    if -1 in places or places != sorted(places):
        yield "has no setup, result and verdict in this order"
    verdict = text[max(places[-1], 0) :]
    names = FILE.findall(verdict)
    if "History: " not in verdict and "entry above" not in verdict:
        if not any(map(there, names)):
            yield "names no file"
        yield from (f"names {name}, which is not there" for name in names if "/" in name and not there(name))


@pytest.fixture(scope="module")
def there():
    with importable(ROOT / "docs" / "generate") as module:
        published = module("figure_cells").names()

    def there(name):
        name = name.replace(".jsonl.xz", "")
        matches = any(fnmatchcase(file, pattern) for pattern in (name, f"{name}/*") for file in published)
        return matches or any((at / name).exists() for at in (ROOT, ROOT / "selfspec_cli"))

    return there


def test_every_entry_has_its_five_parts(there):
    book = entries((ROOT / "results" / "LOG.md").read_text(encoding="utf-8"))
    assert len(book) > 40
    assert {heading: said for heading, lines in book.items() if (said := list(faults(heading, lines, there)))} == {}


def test_a_part_that_lacks_is_named(there):
    good = ["### Is it?", "- Setup: a.", "- Result, here: b.", "- Verdict: yes. `cpu`, `gpu/widened`"]
    assert list(faults("Is it?", good, there)) == []
    assert list(faults("It is", good, there)) == ["is no question"]
    assert list(faults("Is it?", [*good, *["more"] * 5], there)) == ["has 9 lines"]
    assert "has no setup, result and verdict in this order" in list(faults("Is it?", good[:1] + good[:0:-1], there))
    gone = [*good[:-1], "- Verdict: yes. `cpu`, `gpu/nothing`"]
    assert list(faults("Is it?", gone, there)) == ["names gpu/nothing, which is not there"]
    assert list(faults("Is it?", [*good[:-1], "- Verdict: yes."], there)) == ["names no file"]


def test_the_change_log_is_the_notes_of_a_release():
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# Changelog" and any(re.fullmatch(r"## \d+\.\d+\.\d+ .*", line) for line in lines)
    assert len(lines) <= 100
