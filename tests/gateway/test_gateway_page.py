"""docs/gateway_reference.md has a table of all settings. `python tests/gateway/test_gateway_page.py` writes it."""

import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

from selfspec_cli.gateway.policies import POLICIES
from selfspec_cli.gateway.settings import GatewaySettings

PAGE = Path(__file__).parents[2] / "docs" / "gateway_reference.md"


def rows(schema, place=""):
    hints = get_type_hints(schema)
    for column in fields(schema):
        kind, about = hints[column.name], column.metadata.get("knob")
        inner = next((one for one in get_args(kind) if is_dataclass(one)), None)
        if inner is not None:
            yield from rows(inner, f"{place}{column.name}.N.")
        elif is_dataclass(kind):
            yield from rows(kind, f"{place}{column.name}.")
        else:
            default = column.default if column.default is not MISSING else column.default_factory()
            shown = (
                f"unset: {about.unset}"
                if default is None
                else f"`{str(default).lower()}`"
                if isinstance(default, bool)
                else f"`{default}`"
            )
            yield f"| `{place}{column.name}` | {shown} | {about.unit} | {about.help} |"
            if column.name == "policy_options":
                for name, policy in POLICIES.items():
                    yield from rows(policy.options, f"policy_options.{name}.")


def with_table(text):
    table = "\n".join(["", "| setting | default | unit | meaning |", "|---|---|---|---|", *rows(GatewaySettings), ""])
    return re.sub("(<!-- settings -->).*(<!-- /settings -->)", lambda m: m[1] + table + m[2], text, flags=re.S)


def test_the_page_has_every_setting():
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_table(text), f"write it anew: python {Path(__file__).name}"
    assert "| `limits.at_once` | `4096` |" in text


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
