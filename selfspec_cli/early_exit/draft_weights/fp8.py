"""8-bit floats (e4m3), one scale a row: half the bytes of bf16, which bound a draft step at a small batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from selfspec_cli.early_exit.draft_weights.base import DraftWeights, WeightFacts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LARGEST = 448.0  # of e4m3
CHUNK = 2**25  # elements quantised at once, so that the float32 values in between stay below 128 MiB
CAPABILITY = (8, 9)  # the first GPUs that multiply by e4m3


class E4m3(DraftWeights):
    """A copy is {"weight": e4m3 [out, in], "scale": float32 [out, 1]}; the weight is about weight * scale."""

    name = "fp8"
    help = "8-bit float (e4m3) copies with one scale a row, made at load"
    bits = 8.0
    kernels = "selfspec_cli.vllm_plugin.weights.fp8"
    experts = True

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """Symmetric, one scale a row (output channel), the row's largest magnitude at 448; zeros stay zeros. An error
        is at most a sixteenth of the value (3 mantissa bits), or half the smallest step, 2^-10 of the scale."""
        import torch

        copy = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
        scale = torch.empty((len(weight), 1), dtype=torch.float32, device=weight.device)
        step = max(1, CHUNK // weight.shape[1])
        for start in range(0, len(weight), step):
            rows = slice(start, start + step)
            values = weight[rows].float()
            largest = values.abs().amax(dim=1, keepdim=True)  # [rows, 1]; NaN where a value is
            scale[rows] = torch.where(largest == 0, 1.0, largest / LARGEST)
            # Rounding may leave the largest value just beyond 448, which e4m3 would turn into NaN.
            copy[rows] = (values / scale[rows]).clamp_(-LARGEST, LARGEST).to(copy.dtype)
        if not scale.isfinite().all():
            raise self.not_finite()
        return {"weight": copy, "scale": scale}

    def dequantise(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return (tensors["weight"].float() * tensors["scale"]).to(dtype)

    def reason_against(self, facts: WeightFacts) -> str | None:
        """On CUDA the kernels also need bfloat16 and a GPU that knows e4m3."""
        if facts.device == "cuda":
            if facts.capability is not None and facts.capability < CAPABILITY:
                return f"the kernels need a GPU of compute capability 8.9 or more, and this is {facts.device_name}"
            if facts.dtype not in (None, "bfloat16"):
                return f"the kernels multiply bfloat16 tokens, and the model's dtype is {facts.dtype}"
        return super().reason_against(facts)


FP8 = E4m3()
