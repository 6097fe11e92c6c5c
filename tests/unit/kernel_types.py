"""Types of the named tuples that kernels of the V2 draft loop take, for compiling them without a GPU."""

from __future__ import annotations

from typing import Any

from selfspec_cli.vllm_plugin.v2.draft_budget import Acceptance, Limits
from selfspec_cli.vllm_plugin.v2.matches import Matches
from selfspec_cli.vllm_plugin.v2.round_setup import Verdict
from selfspec_cli.vllm_plugin.v2.state import GateRule, Progress, RoundInputs

WIDE = {"positions", "sample_positions", "idx_mapping", "requests", "draft_tokens", "step", "counts", "last_sampled",
        "found"}  # fmt: skip
REAL = {"row_limits", "cell_limits", "own_limits", "rises", "falls", "rates", "usual", "rule", "own"}


def types(kind: Any) -> Any:
    """The tuple `kind` with the type of a pointer in the place of each tensor."""
    return kind(*("*i64" if name in WIDE else "*fp32" if name in REAL else "*i32" for name in kind._fields))


INPUTS, PROGRESS, GATE, LIMITS, ACCEPTANCE, VERDICT, MATCHES = map(
    types, (RoundInputs, Progress, GateRule, Limits, Acceptance, Verdict, Matches)
)
