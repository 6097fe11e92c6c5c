"""What a kind of draft weights is. Free of torch until a method needs it: settings are checked against kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from selfspec_cli.early_exit.errors import SettingsError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class WeightFacts:
    """What decides whether copies of a target's weights can be made and run. None: not known yet, and not refused.
    device: "cpu" or "cuda". dtype: of the target's weights, such as "bfloat16"; quantization: their method, "" for
    plain ones. expert_parallel: whether ranks hold different experts. row_lengths: of a rank's weights, as far as they
    are known before the model is loaded. capability: of the CUDA device, such as (9, 0); device_name: for messages."""

    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    is_moe: bool | None = None
    expert_parallel: bool = False
    row_lengths: tuple[int, ...] = ()
    capability: tuple[int, int] | None = None
    device_name: str | None = None


class DraftWeights:
    """A kind of weights for drafts: how a copy is made of the target's weight, and what multiplies by it.

    Copies are made when an engine starts, beside the target's own weights, which the verify pass keeps: they can change
    which drafts are proposed and never which tokens are generated. A copy is a dict of tensors by name, in the kind's
    own layout. The methods here run anywhere; where speed counts, a module of kernels takes over.

    name: what users write. help: one line for `--help`. bits: of a copy for each weight, scales included; None for the
    target's own. copies: False for a kind that makes none. drafts: False where no layer drafts, only prompt lookup.
    kernels: module with the fast products on CUDA (`vllm_plugin.weights.copied.Kernels`), or None. experts: whether
    that module has products for a mixture of experts."""

    name: str
    help: str
    bits: float | None = None
    copies: bool = True
    drafts: bool = True
    kernels: str | None = None
    experts: bool = False

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """The copy of a weight [out, in] of any float type, on the same device.
        Raises SettingsError (`not_finite`) for a value that is NaN or infinite."""
        raise NotImplementedError

    def fit(self, weight: Tensor, moment: Tensor) -> dict[str, Tensor]:
        """Quantise for data of second moment `moment` [in, in] (`fitted_weights.py`); by default as `quantise`."""
        return self.quantise(weight)

    def dequantise(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The weight [out, in] that a copy represents, rounded to `dtype` once."""
        raise NotImplementedError

    def product(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """x [n, in] times the copy -> [n, out] in x's dtype, in plain PyTorch: what kernels are checked against."""
        from torch.nn import functional as F

        return F.linear(x, self.dequantise(tensors, x.dtype))

    def reason_against(self, facts: WeightFacts) -> str | None:
        """Why there can be no such copies for a target and a machine with these facts; None where there can be.
        By default linear layers, plain or quantised, are copied, and plain experts."""
        if not self.copies:
            return None
        if facts.quantization and facts.is_moe:
            return f"the target's experts are quantised already ({facts.quantization})"
        if facts.is_moe and facts.device == "cuda" and self.kernels is not None and not self.experts:
            return "its kernels multiply linear layers, and this is a mixture of experts"
        if facts.is_moe and facts.expert_parallel:
            return "enable_expert_parallel = True, and copies are for experts that are split as other weights are"
        return None

    def impossible(self, reason: str) -> SettingsError:
        """The error for a target that cannot be copied, and why."""
        return SettingsError(f"draft_weights {self.name!r} is not supported here: {reason}; allowed: shared")

    def not_finite(self) -> SettingsError:
        """The error for a weight with a value that is NaN or infinite."""
        return SettingsError(
            f"draft_weights {self.name!r} needs finite weights: one is NaN or infinite; allowed: shared"
        )
