"""The text of the device function that computes every gate's statistic: run as plain Python, torch for Triton."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.vllm_plugin.v2.statistics import FEATURES, compiled, source

LANGUAGE = SimpleNamespace(
    float32=torch.float32,
    full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
    where=torch.where,
    load=lambda place, mask, other: BEFORE[place] if mask else other,
)
BEFORE = [9.0, 0.5, 9.0]  # what each gate's statistic was at the step before


@pytest.mark.parametrize(("later", "survival"), [(True, 0.25 * 0.5), (False, 0.25)])
def test_each_gate_has_its_own_column_and_a_cumulative_one_reads_the_step_before(later, survival):
    names = {"triton": SimpleNamespace(jit=lambda function: function), "tl": LANGUAGE}
    exec(source([GATES["entropy"], GATES["survival"], GATES["maxp"]]), names)
    draft = {"confidence": 0.25, "second": 0.2, "entropy": 1.5, "varentropy": 2.0, "logit": 3.0, "logsumexp": 4.0}
    values = names["statistics"](torch.arange(4), **draft, before=0, later=later)
    assert values.tolist() == [1.5, survival, 0.25, 0.0]


def test_triton_finds_the_text_of_what_it_compiles():
    text = source(GATES[name] for name in FEATURES)
    assert inspect.getsource(compiled(text).fn) == text
