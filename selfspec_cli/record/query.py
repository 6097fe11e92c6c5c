"""Which rows a user means: conditions on columns, such as gate=varH, speedup>1.5, status~memory."""

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.record.columns import KINDS, Record

SHORT = {"tok_s": "tok_s_median", "machine": "device", "id": "point", "run": "run_id"}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(r"(\w+)\s*(<=|>=|!=|=|<|>|~)\s*(.*)")


def chosen(rows: Iterable[Record], words: Sequence[str]) -> list[Record]:
    """The rows that meet every condition; raises ConfigError for one that cannot be read."""
    conditions = [condition(word) for word in words]
    return [row for row in rows if all(holds(row) for holds in conditions)]


def condition(word: str) -> Callable[[Record], bool]:
    """COLUMN, an operator (= != < > <= >=, or ~ for a part of the text), and a value; = and != take a,b,c. An empty
    value means that nothing was measured. A row without a value meets no comparison of size."""
    match = _CONDITION.fullmatch(word.strip())
    if match is None:
        raise ConfigError(f"cannot read the condition {word!r}: write COLUMN=VALUE, such as gate=varH or speedup>1.5")
    name, sign, text = SHORT.get(match[1], match[1]), match[2], match[3].strip()
    if name not in KINDS:
        raise ConfigError(closest(name, KINDS, "column"))
    if sign == "~":
        return lambda row: text.lower() in str(getattr(row, name) or "").lower()
    if sign in ("=", "!="):
        values = [_value(name, part.strip(), word) for part in text.split(",")]
        return lambda row: (getattr(row, name) in values) == (sign == "=")
    limit = _value(name, text, word)
    return lambda row: getattr(row, name) is not None and _COMPARE[sign](getattr(row, name), limit)


def _value(name: str, text: str, word: str) -> Any:
    """A value in the type of its column; None for no text."""
    kind = KINDS[name]
    if not text:
        return None
    if kind.startswith("bool"):
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{word}: {name} is true or false")
        return text.lower() == "true"
    if not kind.startswith(("int", "float")):
        return text
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{word}: {name} is a number, not {text!r}") from error
