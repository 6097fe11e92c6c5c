"""The table of request fields in docs/limits.md, from the fields that the tests of both runners ask for."""

import runpy
from pathlib import Path

FILE = Path(__file__).parents[1] / "engine" / "request_fields.py"

HEAD = """
### Fields of a request

Fields of vLLM's SamplingParams, in one batch with all others: with drafts, without any by load (a table of lengths) and
by request (`selfspec_k` 0). "yes": each time the answer, with its log-probabilities, is a plain engine's.
`temperature`, `top_p`, `top_k` and `min_p` were asked for so that one token is left; for the distribution see
`tests/engine/test_sampling.py` and `tests/engine/v2/test_v2_sampling.py`.

| field | V1, on a CPU | V2, in Triton's interpreter | what to know |
|---|---|---|---|
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
    return f"| {', '.join(names)} | {on_v1} | {on_v2} | {note} |\n"
