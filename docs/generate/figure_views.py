"""Acceptance of copies of all layers as the table of docs/which_models.md."""

from __future__ import annotations

from figure_cells import rows_of, table

COPIES = {
    "8 bits": "int8",
    "6 bits": "int6",
    "e4m3 (8 bits)": "fp8",
    "5 bits": "int5",
    "4 bits": "int4",
    "6 bits, rounded with data": "int6 weights-int6",
    "5 bits, rounded with data": "int5 weights-int5",
    "the same, correction of rank 32": "int5 weights-int5-r32",
    "4 bits, rounded with data": "int4 weights-int4",
    "the same, with a correction of rank 32": "int4 weights-int4-r32",
}
MODELS = {
    "SmolLM2-135M": ("smollm2_views", "smollm2_fitted"),
    "reference model": ("reference_views",),
    "its control": ("plain_views",),
}


def first_drafts() -> str:
    """Shares of first drafts that are accepted, by kind of copies, model and way to draft."""
    known = {
        (model, row["view"], float(row["temperature"]), row["drafts"]): row["given_before"]
        for model, files in MODELS.items()
        for name in files
        for row in rows_of(f"views/{name}.csv")
        if row["position"] == "1"
    }
    ways = {
        "greedy": (0.0, "most likely"),
        "at 0.8, most likely": (0.8, "most likely"),
        "at 0.8, drawn": (0.8, "drawn"),
    }
    header = [f"{model}, {way}" for model in MODELS for way in ways]
    lines = []
    for words, view in COPIES.items():
        cells = [known.get((model, view, *way)) for model in MODELS for way in ways.values()]
        lines.append((words, *(None if cell is None else f"{float(cell):.3f}" for cell in cells)))
    return table(("copies of all layers", *header), lines)
