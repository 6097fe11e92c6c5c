"""The table of request fields in docs/limits.md, from the fields that the tests of both runners ask for."""

import runpy
from pathlib import Path

FILE = Path(__file__).parents[1] / "engine" / "request_fields.py"

HEAD = """
### Fields of a request

Each field of vLLM's SamplingParams, on both runners (V1 on a CPU, V2 in Triton's interpreter), in one batch with all
others: while tokens are drafted, while a table of lengths switches drafts off by load, and while each request asks for
none (`selfspec_k` 0). "yes": the answer, with its log-probabilities, is a plain engine's. `temperature`, `top_p`,
`top_k` and `min_p` were asked for so that one token is left; that drafts keep the distribution is shown apart
(`tests/engine/test_sampling.py`, on V2 `tests/engine/v2/test_v2_sampling.py`).

| field | V1: drafts | off by load | off by request | V2: drafts | off by load | off by request | what to know |
|---|---|---|---|---|---|---|---|
"""


def section() -> str:
    """The part of the page."""
    known = runpy.run_path(str(FILE))
    rows = dict.fromkeys(known["FIELDS"], ("yes", "yes"))
    rows |= dict.fromkeys(known["V2_FIELDS"], ("refused", "yes"))
    rows |= {name: ("refused", "refused") for name in known["REFUSED"] if name not in known["V2_FIELDS"]}
    notes: dict[str, str] = known["NOTES"]
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name in sorted(rows):
        alike.setdefault((*rows[name], notes.get(name, "")), []).append(name)
    return HEAD + "".join(_line(names, *said) for said, names in alike.items())


def fields() -> set[str]:
    """The fields that the section names."""
    lines = section().splitlines()[HEAD.count("\n") :]
    return {name for line in lines for name in line.split(" | ")[0].strip("| ").split(", ")}


def _line(names: list[str], on_v1: str, on_v2: str, note: str) -> str:
    return f"| {', '.join(names)} | " + " | ".join([*[on_v1] * 3, *[on_v2] * 3]) + f" | {note} |\n"
