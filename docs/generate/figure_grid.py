"""A folder of points as one table: a row an arm, a column a load; each cell is one point."""

from __future__ import annotations

from dataclasses import replace

from figure_cells import number, percent, points_of, ratio, table

from selfspec_cli.record import tables
from selfspec_cli.record.columns import Record
from selfspec_cli.report.rows import label


def by_load(*folders: str) -> str:
    """Tokens a second and speedups of folders with several loads.

    Raises:
        ValueError: two points would share a cell.
    """
    cells: dict[str, dict[tuple[int | None, int | None], str]] = {}
    for row in _rows(folders):
        load = (row.input_len, row.batch)
        if load in cells.setdefault(_arm(row), {}):
            raise ValueError(f"{folders}: two points are {_arm(row)} at {load}")
        cells[_arm(row)][load] = _speed(row)
    loads = sorted({load for line in cells.values() for load in line}, key=lambda load: (load[0] or 0, load[1] or 0))
    short = loads[0][0]
    header = [
        f"batch {batch}" + ("" if tokens == short else f", {tokens:,} tokens of context") for tokens, batch in loads
    ]
    return table(
        ("arm, tok/s (speedup)", *header), [(arm, *(line.get(load) for load in loads)) for arm, line in cells.items()]
    )


def by_arm(*folders: str) -> str:
    """Speed, accept rate and equality of folders with one load."""
    rows = [
        (
            _arm(row),
            _speed(row),
            percent(row.accept_rate),
            number(row.mean_accepted_len),
            None if row.identical is None else f"{row.identical} of {row.outputs}",
        )
        for row in _rows(folders)
    ]
    return table(("arm", "tok/s (speedup)", "accept rate", "tokens a verify step", "identical outputs"), rows)


def _rows(folders: tuple[str, ...]) -> list[Record]:
    return [tables.row(point) for name in folders for point in points_of(name)]


def _arm(row: Record) -> str:
    return label(replace(row, acceptance_length=None))


def _speed(row: Record) -> str:
    over = "" if row.arm == "baseline" else f" ({ratio(row.speedup)})"
    return f"{number(row.tok_s_median, 3)}{over}"
