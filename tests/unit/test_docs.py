"""docs/ builds without a network and without a dead link; what is generated of it is not stale; its figures exist."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import points
import pytest
from refusals import said
from scripts import importable

from selfspec_cli.record import archive, folder

ROOT = Path(__file__).parents[2]
DOCS, PUBLISHED = ROOT / "docs", ROOT / "results" / "published"

with importable(DOCS / "generate") as module:
    quoted = module("quoted")


@pytest.fixture(scope="module")
def doc_pages():
    """docs/generate/doc_pages.py, which is a script with modules beside it."""
    with importable(DOCS / "generate") as module:
        yield module("doc_pages")


def test_generated_pages_are_those_of_the_published_files(doc_pages):
    for path, text in doc_pages.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"write {path.name} anew: python docs/generate/doc_pages.py"


def test_every_folder_of_points_has_a_line_where_it_is_published():
    lines = (PUBLISHED / "README.md").read_text(encoding="utf-8").splitlines()
    described = [line.split("`")[1] for line in lines if line.startswith("| `")]
    folders = {archive.shown(runs.parent.relative_to(PUBLISHED)) for runs in archive.below(PUBLISHED, folder.RUNS)}
    assert len(folders) > 8
    assert folders - set(described) == set() and len(described) == len(set(described))


QUOTING = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md"))]


@pytest.mark.parametrize("name", QUOTING)
def test_every_figure_that_is_quoted_is_that_of_the_point_it_names(name):
    assert quoted.problems((ROOT / name).read_text(encoding="utf-8"), quoted.listed().get(name, [])) == []


def test_every_page_of_the_list_is_a_page():
    assert set(quoted.listed()) <= set(QUOTING) == set(quoted.pages())


@pytest.mark.parametrize("name", ["docs/which_models.md", "docs/blog/early_exit.md", "docs/measurements.md"])
def test_a_wrong_digit_on_the_page_and_in_the_list_is_found(name):
    quotes = quoted.listed()[name]
    for figure, source in quotes:
        if quoted.value(source) is None:
            continue
        last = max(place for place, letter in enumerate(figure) if letter.isdigit())
        wrong = figure[:last] + str((int(figure[last]) + 1) % 10) + figure[last + 1 :]
        (problem,) = quoted.problems(f"It is {wrong}.", [(wrong, source)])
        assert " is " in problem


def test_figures_that_changed_places_are_found():
    quotes = [("2.20x", "gpu/widened e4209e624b23 speedup"), ("63 %", "gpu/widened e4209e624b23 accept_rate")]
    assert quoted.problems("2.20x, of 63 %", quotes) == []
    assert quoted.problems("63 %, and 2.20x", quotes) == ["63 % is where quoted.tsv has 2.20x"]


def test_what_a_line_may_say():
    one = ("2.20x", "gpu/widened e4209e624b23 speedup")
    other = ("2.20x", "gpu/widened e4209e624b23-20261121-201444-dfbb speedup")
    assert quoted.problems("2.20x and **2.20x**", [one, other]) == []
    assert quoted.problems("2.05x, 60 requests, 1.5 ms", [("2.05x", "external: a paper")]) == []
    assert quoted.problems("<!-- cpu -->\n| 9.99x |\n<!-- /cpu -->\n", []) == []
    assert quoted.problems("2.20x, 2.20x", [one]) == ["2.20x names no published point"]
    assert quoted.problems("2.20x", [("2.20x", "-")]) == ["2.20x names no published point"]
    assert quoted.problems("63 % of 63 %", [("63 %", "gpu/widened e4209e624b23 accept_rate"), ("63 %", "-")]) == []
    assert quoted.problems("nothing", [one]) == ["2.20x is in quoted.tsv and not on the page"]
    for source, words in (
        ("gpu/widened 000000000000 speedup", "0 points"),
        ("cpu 04e1af9d46c8 speedup", "2 points"),
        ("gpu/widened e4209e624b23 sped", "nothing published"),
        ("gpu/widened e4209e624b23 skip_layers", "has no skip_layers"),
        ("nowhere e4209e624b23 speedup", "0 points"),
        ("serving/none.json: rows", "nothing published"),
        ("serving/soak_cpu.json: rows: 7: tok_s_median", "nothing published"),
    ):
        (problem,) = quoted.problems("2.20x", [("2.20x", source)])
        assert words in problem
    two_hosts = quoted.value("gpu/smollm2/h100+gpu/smollm2/slow_host_h100 e7dd82f25482 speedup")
    assert two_hosts == pytest.approx(1.642, abs=1e-3)


def test_a_comment_moves_into_the_list_and_lines_follow_their_sentences():
    page = (
        "It is **2.20x**<!-- gpu/widened e4209e624b23 speedup --> by 63 %<!-- gpu/widened e4209e624b23 accept_rate -->."
    )
    assert quoted.problems(page, [])
    clean, lines, lost = quoted.moved(page, [])
    assert clean == "It is **2.20x** by 63 %." and lost == [] and quoted.problems(clean, lines) == []
    turned = "By 63 % it is 2.20x, and 2.20x again."
    same, ordered, lost = quoted.moved(turned, lines)
    assert same == turned and ordered == lines[::-1] and lost == []
    assert quoted.problems(turned, ordered) == ["2.20x names no published point"], "the second one names none"
    assert quoted.moved("It is 2.21x by 63 %.", lines)[2] == lines[:1], "a line is not lost in silence"


def test_a_removed_sentence_takes_its_own_line_with_it():
    lines = [("1.1x", "first"), ("2.20x", "first"), ("1.31x", "-"), ("2.20x", "second"), ("3.00x", "third")]
    _, kept, lost = quoted.moved("Now 2.20x and 3.00x.", lines)
    assert kept == lines[3:] and lost == lines[:2]


def test_a_row_of_the_readme_is_one_setting(doc_pages):
    readme = sys.modules["figure_tables"]
    for keys, words in (
        ({1: "d3701b6eeedf", 32: "1c455bf81bc9"}, "another load or setting"),  # k=12 and a gate; k=4
        ({1: "1c455bf81bc9"}, "another load"),
        ({8: "1" * 12}, "no point"),
    ):
        assert words in said(ValueError, readme.setting_cells, readme.Line("m", "s", ("rivals/gpu",), keys))
    line = readme.Line("m", "s", ("gpu/smollm2/h100", "gpu/smollm2/slow_host_h100"), {1: "e7dd82f25482"})
    assert readme.setting_cells(line) == ["1.64x (2 runs)", "", "", "", ""]


def test_the_milestones_of_a_model_of_28_layers_count_its_own_bytes(doc_pages, monkeypatch):
    sprint = sys.modules["figure_tables"]
    weights = {"full": 28.0 * 90 + 470, "draft": 12.0 * 90 + 470, "full_kv_token": 28.0, "draft_kv_token": 12.0}
    m1, m4 = ({"command": ["selfspec", "sweep", f"experiment={name}"]} for name in ("m1_skip", "m4_varh"))
    base = points.baseline(**m4)
    varh = {**points.ARM, "E": 12, "gate": "varH", "threshold": 5.0}
    drafting = points.against(base, arm=varh, engine={"step_bytes": weights}, **m4)
    skip = points.against(base, "2", arm={**points.ARM, "arm": "skip", "E": 8, "k": None, "gate": None}, **m1)
    monkeypatch.setattr(sprint, "points_of", lambda place: [base, drafting, skip])
    rows = [[cell.strip() for cell in line.split("|")[1:]] for line in sprint.milestones("any").splitlines()]
    found = {row[0]: row[rows[0].index("by bytes read")] for row in rows}
    assert found["m1"] == f"{(28 * 90 + 470) / (8 * 90 + 470):.2f}x"
    assert "m4" in found and "m0" not in found


class Loaded(HTMLParser):
    """What a page makes a browser load by itself."""

    def __init__(self):
        super().__init__()
        self.urls = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "object"):
            self.urls.append(given.get("src") or given.get("data"))
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.urls.append(given.get("href"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="pip install 'selfspec[docs]' builds the pages")
    folder = tmp_path_factory.mktemp("site")
    run = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_pages_build_and_load_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        parser = Loaded()
        parser.feed(page.read_text(encoding="utf-8"))
        assert any(url and url.endswith(".css") for url in parser.urls)
        assert [url for url in parser.urls if url and re.match(r"(https?:)?//", url)] == [], page.name
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


def test_the_page_of_measurements_leads_to_every_archive():
    """A reader of the repository found a stub of nine lines behind ten links."""
    text = (DOCS / "measurements.md").read_text(encoding="utf-8")
    linked = {(DOCS / link).resolve() for link in re.findall(r"\]\((\.\./results/[^)#]+)\)", text)}
    assert all(path.exists() for path in linked)
    archives = set(PUBLISHED.rglob("*.jsonl.xz"))
    assert {path for path in linked if path.suffix == ".xz"} == archives


@pytest.mark.slow
def test_the_lab_book_is_a_page_and_scripts_are_left_out(site):
    first = (ROOT / "results" / "LOG.md").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    assert first in (site / "lab_book.html").read_text(encoding="utf-8")
    assert not list(site.rglob("*.py"))
