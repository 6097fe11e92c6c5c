"""Types of the named tuples that kernels of the V2 draft loop take, for compiling them without a GPU."""

from typing import Any

from selfspec_cli.vllm_plugin.v2.round_setup import Verdict
from selfspec_cli.vllm_plugin.v2.state import GateRule, Limits, Matches, Progress, RoundInputs, Worth

WIDE = {
    "positions",
    "sample_positions",
    "idx_mapping",
    "requests",
    "draft_tokens",
    "step",
    "counts",
    "last_sampled",
    "found",
}
REAL = {"row_limits", "own_limits", "rates", "rule", "own", *Worth._fields}


def types(kind: Any) -> Any:
    """The tuple `kind` with the type of a pointer in the place of each tensor."""
    return kind(*("*i64" if name in WIDE else "*fp32" if name in REAL else "*i32" for name in kind._fields))


INPUTS, PROGRESS, GATE, LIMITS, WORTH, VERDICT, MATCHES = map(
    types, (RoundInputs, Progress, GateRule, Limits, Worth, Verdict, Matches)
)
