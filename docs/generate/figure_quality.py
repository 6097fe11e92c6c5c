"""The tables of quality, from the published folders of `experiments/quality_table.py`."""

from __future__ import annotations

import sys

from figure_cells import ROOT, at, table

sys.path.insert(0, str(ROOT / "experiments"))
from quality_table import COLUMNS, cells

MODELS = {
    "reference": "The embedded model, which was trained for early exit",
    "smollm2": "SmolLM2-135M-Instruct, an ordinary chat model that drafts with 8-bit copies of all its layers",
}
TABLES = (
    ("arm", "tok/s", "accept rate", "same greedy", "scores", "verdict"),
    ("arm", "PPL of text", "ΔPPL", "ΔPPL of greedy", "ΔPPL of sampled"),
)


def quality_tables() -> str:
    """For each model what an arm reached, and what perplexity; the columns of one table are too many for a page."""
    parts = []
    for name, about in MODELS.items():
        rows = [dict(zip(COLUMNS, line, strict=True)) for line in cells(at(f"quality/{name}"))]
        parts.append(f"### {about}")
        parts += [table(columns, [tuple(row[column] for column in columns) for row in rows]) for columns in TABLES]
    return "\n\n".join(parts)
