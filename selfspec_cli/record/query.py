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
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(r"(\w+)\s*(<=|>=|!=|=|<|>|~)\s*(.*)")

Condition = Callable[[Record], bool]


def chosen(rows: Iterable[Record], words: Sequence[str]) -> list[Record]:
    """The rows that meet every condition.

    Raises:
        ConfigError: a condition that cannot be read, or a column that there is not (naming the nearest).
    """
    conditions = [condition(word) for word in words]
    return [row for row in rows if all(holds(row) for holds in conditions)]


def condition(word: str) -> Condition:
    """COLUMN, an operator (= != < > <= >=, or ~ for a part of the text), and a value; = and != take a,b,c.

    An empty value means that nothing was measured. A row without a value meets no comparison of size.
    """
    match = _CONDITION.fullmatch(word.strip())
    if match is None:
        raise ConfigError(f"cannot read the condition {word!r}: write COLUMN=VALUE, such as gate=varH or speedup>1.5")
    name, sign, text = match[1], match[2], match[3].strip()
    name = SHORT.get(name, name)
    if name not in KINDS:
        raise ConfigError(closest(name, KINDS, "column"))
    if sign == "~":
        return lambda row: text.lower() in str(getattr(row, name) or "").lower()
    values = [_value(name, part.strip(), word) for part in (text.split(",") if sign in ("=", "!=") else [text])]
    if sign in ("=", "!="):
        return lambda row: (getattr(row, name) in values) == (sign == "=")
    compare, limit = _COMPARE[sign], values[0]
    return lambda row: getattr(row, name) is not None and compare(getattr(row, name), limit)


def _value(name: str, text: str, word: str) -> Any:
    """A value in the type of its column."""
    kind = KINDS[name]
    if not text:
        return None
    if kind.startswith("bool"):
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{word}: {name} is true or false")
        return text.lower() == "true"
    if kind.startswith(("int", "float")):
        try:
            return float(text)
        except ValueError as error:
            raise ConfigError(f"{word}: {name} is a number, not {text!r}") from error
    return text
