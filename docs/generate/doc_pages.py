"""Write the generated parts of pages, between two markers; tests/unit/test_docs.py fails if they are stale.

PYTHONPATH=. python docs/generate/doc_pages.py
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from figure_cells import ROOT, table
from figure_tables import (
    by_load,
    first_drafts,
    fixed_lengths,
    hosts,
    milestones,
    one_line,
    rivals,
    served,
    settings,
    spec_bench,
)
from limits_tables import architectures, fields
from picture_one_line import picture

from selfspec_cli.config import options
from selfspec_cli.config.schema import GROUPS
from selfspec_cli.gateway.policies import POLICIES
from selfspec_cli.gateway.settings import GatewaySettings
from selfspec_cli.record.columns import TABLES, header, meanings

JOINS = {"key": "joins the tables: of one setting on one workload", "point": "joins the tables: of one measurement"}


def columns() -> str:
    """Write a table of the columns of each file of a results folder."""
    parts = []
    for file, kind in TABLES.items():
        meaning = JOINS | meanings(kind)
        rows = [(f"`{name}`", meaning.get(name)) for name in header(kind)]
        about = " ".join((kind.__doc__ or "").split())
        parts += [f"### {file}", f"{about} {len(rows)} columns.", table(("column", "what it holds"), rows)]
    return "\n\n".join(parts)


def every_setting() -> str:
    """Write the choices of registries, the settings, and those that are rarely needed."""
    choices = table(
        ("choice", "threshold if none is given", "what it does"),
        ((f"`{one.key}={one.name}`", one.default, one.help) for one in options.choices()),
    )
    rows = options.rows(rare=True)
    usual, rare = (
        _settings([row for row in rows if (row.key in options.RARE) == is_rare]) for is_rare in (False, True)
    )
    groups = ", ".join(f"`{group}=`" for group in GROUPS)
    return (
        f"{choices}\n\n{groups} choose a named set of the settings below them.\n\n{usual}\n\n"
        f"Rarely needed, and shown by `selfspec options --all`:\n\n{rare}"
    )


def _settings(rows: list[options.Row]) -> str:
    lines = []
    for row in rows:
        kind = ", ".join(filter(None, (row.type, row.unit))) if row.allowed else row.type
        allowed = ": ".join(filter(None, (kind, row.allowed)))
        lines.append((f"`{row.key}`", row.help, allowed, row.default, f"`{row.spec_key}`" if row.spec_key else ""))
    return table(("key", "what it is", "allowed", "default", "in a speculative_config"), lines)


def gateway_settings() -> str:
    """Write a gateway's file with every setting."""
    return "\n".join(["```yaml", *_yaml(GatewaySettings), "```"])


def _yaml(schema: Any, indent: str = "") -> Iterator[str]:
    """Every setting as a line of YAML: its default, and what it means."""
    hints = get_type_hints(schema)
    for column in dataclasses.fields(schema):
        kind, about = hints[column.name], column.metadata.get("knob")
        name = f"{indent}{column.name}:"
        inner = next((one for one in get_args(kind) if dataclasses.is_dataclass(one)), None)
        if dataclasses.is_dataclass(kind):
            yield from (name, *_yaml(kind, f"{indent}  "))
        elif inner is not None:
            yield f"{name:<34}# {about.help}"
            first, *others = _yaml(inner, f"{indent}    ")
            yield from (f"{indent}  - {first.lstrip()}", *others)
        elif column.name == "policy_options":
            yield name
            for policy, entry in POLICIES.items():
                if dataclasses.fields(entry.options):
                    yield from (f"{indent}  {policy}:", *_yaml(entry.options, f"{indent}    "))
        else:
            default = column.default if column.default is not dataclasses.MISSING else column.default_factory()
            unset = f"; unset: {about.unset}" if default is None and about.unset != "no limit" else ""
            yield f"{f'{name} {json.dumps(default)}':<34}# {about.help}{unset}"


WRITTEN = (
    ("README.md", "one_line", one_line),
    ("README.md", "spec_bench", spec_bench),
    ("docs/load.md", "one_line_served", served),
    ("docs/load.md", "one_line_slow_host", lambda: served("served_slow_host")),
    ("docs/load.md", "one_line_8b", lambda: served("served_8b_shape")),
    ("docs/load.md", "one_line_8b_bounded", lambda: served("served_8b_shape_bounded")),
    ("docs/load.md", "fixed_lengths", fixed_lengths),
    ("docs/which_models.md", "rivals", rivals),
    ("docs/which_models.md", "settings", settings),
    ("docs/measurements.md", "gpu_8b", lambda: by_load("gpu/gpu_8b")),
    ("docs/measurements.md", "hosts", hosts),
    ("docs/measurements.md", "long", lambda: by_load("gpu/qwen_1.5b_h200/long")),
    ("docs/measurements.md", "fp8", lambda: by_load("gpu/fp8_8b_h200")),
    ("docs/measurements.md", "milestones", milestones),
    ("docs/which_models.md", "first_drafts", first_drafts),
    ("docs/limits.md", "architectures", architectures),
    ("docs/limits.md", "fields", fields),
    ("docs/gateway_reference.md", "settings", gateway_settings),
    ("docs/reference.md", "options", every_setting),
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
