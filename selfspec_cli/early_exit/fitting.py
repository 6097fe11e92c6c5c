"""Fits exit heads in closed form (equations.py). A head "lsq" is fitted to one-hot tokens, which are added by index. A
"translator" is fitted to z - x, so that the ridge shrinks it toward the lens."""

import torch
from torch import Tensor

from selfspec_cli.early_exit.equations import FitReport, NormalEquations
from selfspec_cli.early_exit.head_module import ExitHead
from selfspec_cli.early_exit.head_spec import HeadSpec
from selfspec_cli.early_exit.heads import HEADS


def translator_target(x: Tensor, z: Tensor) -> Tensor:
    """What a translator is fitted to: z - x in fp64 (bf16 states would lose the difference), [n, hidden]."""
    return z.to(device=x.device, dtype=torch.float64) - x.double()


def fit_head(spec: HeadSpec, equations: NormalEquations, ridge: float = 0.0) -> tuple[ExitHead, FitReport]:
    """The head of `spec` in fp32, in closed form, from equations over its target.

    ridge: relative. Raises FitError as `NormalEquations.solve`, HeadError for equations over targets of another width.
    """
    tensors, report = HEADS[spec.kind].fit(equations, ridge, spec.rank)
    return ExitHead(spec.kind, {name: None if part is None else part.float() for name, part in tensors.items()}), report
