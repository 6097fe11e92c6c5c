"""Write the generated parts of pages, between two markers, and the page of all published figures.

    PYTHONPATH=. python docs/generate/doc_pages.py

writes the parts; tests/unit/test_docs.py fails if they are stale. The page of all figures is in no file: `make docs` adds it to
the site. A new folder of points in results/published gets a table there by itself, and a file without a part is listed
at the end.
"""

from __future__ import annotations

import re
from pathlib import Path

from figure_cells import ROOT, at, names, table
from figure_points import patterns, point_folders, points_section, sections
from figure_quality import milestones, quality_tables
from figure_readme import rivals, rivals_tables, settings
from figure_tables import (
    by_load,
    first_drafts,
    first_layer,
    fixed_lengths,
    hosts,
    one_line,
    served,
)
from picture_one_line import picture

from selfspec_cli.record.columns import TABLES, header, meanings

HEAD = """# Published figures

This page is made from `results/published/` by `docs/generate/` whenever the site is built (`make docs`). The [glossary](reference.md#terms) explains the words, and [reading a row](report.md#reading-a-row) the columns.

- **Synthetic acceptance** means that vLLM accepts drafts at a rate that was set, whatever they are. Such a row says what
  drafting costs, and nothing about how good any model's drafts are. It has a length in the column "synthetic acceptance".
- **Speedups are over the baseline of the same run** and no other. Absolute times differ from machine to machine.
- The points were measured before raw times were kept, so most rows have the least and the greatest of their repeats, and
  no interval.
- Commands are as they were typed, with the folder for the results left out. A script that such a command names and that
  is not in `experiments/` measured once; it is in the history: `git ls-tree -r 066e492d experiments`.
"""


ELSEWHERE = (
    "*/runs/*",
    "quality/*",
    "sprint/conversations/*",
    "serving/*",
    "install/*",
    "gpu/qwen_1.5b_h200/by_context.json",
    "gpu/two_gpus/*",
    "blog/streams_qwen.json",
)
"""Published files that other parts of the page, or other pages, show, and transcripts without figures."""


def left_out() -> list[str]:
    """Return the published files that no part of the page shows."""
    covered = {name for pattern in (*patterns(), *ELSEWHERE) for name in names(pattern)}
    return sorted(set(names()) - covered)


def page() -> str:
    """Write the whole page."""
    names = point_folders()
    now = [points_section(name) for name in names if "earlier" not in name]
    before = [points_section(name) for name in names if "earlier" in name]
    others = [sections(), "### Quality", quality_tables()]
    others += ["### Other methods of vLLM", rivals_tables(at("rivals"))]
    if left_out():
        others += ["### Other files", "\n".join(f"- `{name}`" for name in left_out())]
    parts = [
        HEAD,
        "## Speed\n",
        *now,
        "## Further files\n",
        *others,
        "## Earlier runs\n",
        "With other kernels, on busy hosts or on other cards; see the [lab book](../results/LOG.md).\n",
        *before,
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def columns() -> str:
    """Write a table of the columns of each file of a results folder."""
    parts = []
    for file, kind in TABLES.items():
        meaning = {
            "key": "joins the tables: of one setting on one workload",
            "point": "joins the tables: of one measurement",
        }
        meaning |= meanings(kind)
        rows = [(f"`{name}`", meaning.get(name)) for name in header(kind)]
        about = " ".join((kind.__doc__ or "").split())
        parts += [f"### {file}", f"{about} {len(rows)} columns.", table(("column", "what it holds"), rows)]
    return "\n\n".join(parts)


WRITTEN = (
    ("README.md", "one_line", one_line),
    ("docs/load.md", "one_line_served", served),
    ("docs/load.md", "one_line_8b", lambda: served("served_8b_shape")),
    ("docs/load.md", "first_layer", first_layer),
    ("docs/load.md", "fixed_lengths", fixed_lengths),
    ("docs/which_models.md", "rivals", rivals),
    ("docs/which_models.md", "settings", settings),
    ("docs/measurements.md", "gpu_8b", lambda: by_load("gpu/gpu_8b")),
    ("docs/measurements.md", "hosts", hosts),
    ("docs/measurements.md", "long", lambda: by_load("gpu/qwen_1.5b_h200/long")),
    ("docs/measurements.md", "fp8", lambda: by_load("gpu/fp8_8b_h200")),
    ("docs/measurements.md", "milestones", milestones),
    ("docs/which_models.md", "first_drafts", first_drafts),
    ("docs/reference.md", "columns", columns),
)
"""Generated parts of pages: the page, the name of the two markers around the part, and what writes it."""


def pages() -> dict[Path, str]:
    """Every page that has a part that is written here, the README's picture, and what they should be.

    Raises:
        ValueError: a page has lost its markers.
    """
    texts: dict[Path, str] = {}
    for name, marker, write in WRITTEN:
        path, text = ROOT / name, write()
        parts = re.split(f"(<!-- /?{marker} -->)", texts.get(path) or path.read_text(encoding="utf-8"))
        if len(parts) != 5:
            raise ValueError(f"{name}: a part stands between <!-- {marker} --> and <!-- /{marker} -->")
        texts[path] = f"{parts[0]}{parts[1]}\n{text}\n{parts[3]}{parts[4]}"
    texts[ROOT / "docs" / "one_line.svg"] = picture()
    return texts


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
