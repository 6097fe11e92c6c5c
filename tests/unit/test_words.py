"""Words of this project's own that the field's have replaced do not come back, in code, pages or names of files.

Not looked at: CHANGELOG.md and results/LOG.md, which name what was renamed, and published results.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RETIRED = {
    r"steps that requests join": "mixed prefill and decode batches",
    r"allowances?": "draft budget",
    r"\brest(s|ing)\b": "drafting disabled",
    r"\breading\.py": "step_order.py",
    r"\bbegin\.py": "round_setup.py",
    r"\btrim(s|med|ming)?\b": "adaptive verification",
    r"\btest_holds\b": "test_server_stress",
    r"\brungs?\b": "levels",
    r"\btold\b(?! apart)": "given, passed",
    r"\bread (again|once more)\b": "reviewed",
    r"\bsaid in one place\b": "defined once",
    r"\bgo(es)? by\b": "uses, follows",
    r"\bof late\b": "recently",
    r"\bby turns\b": "alternating",
    r"\bstands? for\b": "represents",
}
"""A retired word, as a regular expression without regard to case, and what is written instead."""

EXEMPT = (
    "CHANGELOG.md",
    "results/LOG.md",
    "results/published/",
    "tests/unit/test_words.py",
)

TEXT = (".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".json", ".html", ".js", ".css", ".sh", "Makefile")


def files() -> list[str]:
    """Paths of the repository's own text files, relative to its root."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout, so nothing says which files are the project's")
    return [
        name
        for name in listed.stdout.splitlines()
        if name.endswith(TEXT) and not name.startswith(EXEMPT) and (ROOT / name).is_file()
    ]


def retired(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, retired word, what to write instead) of a text; a word may be broken over lines."""
    for pattern, instead in RETIRED.items():
        for found in re.finditer(pattern.replace(" ", r"\s+"), text, re.IGNORECASE):
            yield text.count("\n", 0, found.start()) + 1, found[0], instead


def test_retired_words_are_gone():
    found = []
    for name in files():
        text = (ROOT / name).read_text(encoding="utf-8") + f"\n{name}"
        found += [f"{name}:{line}: {word!r}; write: {instead}" for line, word, instead in retired(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Allowances of a round, and an allowance.", ["Allowances", "allowance"]),
        ("The gate rests. The rest is drafted.", ["rests"]),
        ("see v2/reading.py, not step_order.py", ["reading.py"]),
        ("They alternate, by\nturns.", ["by\nturns"]),
        ("it was told k, and told apart", ["told"]),
        ("a strip is trimmed in trimming.py", ["trimmed", "trimming"]),
        ("interested, restart, forests, outgoes bytes", []),
    ],
)
def test_words_are_found_and_others_are_not(text, words):
    assert sorted(word for _, word, _ in retired(text)) == sorted(words)
