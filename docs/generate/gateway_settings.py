"""The file of all settings in docs/gateway_reference.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from selfspec_cli.gateway.policies import POLICIES
from selfspec_cli.gateway.settings import GatewaySettings


def gateway_settings() -> str:
    """Write a gateway's file with every setting."""
    return "\n".join(["```yaml", *_lines(GatewaySettings), "```"])


def _lines(schema: Any, indent: str = "") -> Iterator[str]:
    """Every setting as a line of YAML: its default, and what it means."""
    hints = get_type_hints(schema)
    for column in fields(schema):
        kind, about = hints[column.name], column.metadata.get("knob")
        name = f"{indent}{column.name}:"
        inner = next((one for one in get_args(kind) if is_dataclass(one)), None)
        if is_dataclass(kind):
            yield from (name, *_lines(kind, f"{indent}  "))
        elif inner is not None:
            yield f"{name:<34}# {about.help}"
            first, *others = _lines(inner, f"{indent}    ")
            yield from (f"{indent}  - {first.lstrip()}", *others)
        elif column.name == "policy_options":
            yield name
            for policy, entry in POLICIES.items():
                if fields(entry.options):
                    yield from (f"{indent}  {policy}:", *_lines(entry.options, f"{indent}    "))
        else:
            default = column.default if column.default is not MISSING else column.default_factory()
            unset = f"; unset: {about.unset}" if default is None and about.unset != "no limit" else ""
            yield f"{f'{name} {json.dumps(default)}':<34}# {about.help}{unset}"
