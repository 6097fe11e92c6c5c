"""Fitted copies of a small model as those of the widened one (experiments/reference_model/widen.py).

    python experiments/views/widen_fitted.py --weights int4.safetensors --source smollm2 --model smollm2_widened \
        --out int4-widened.safetensors

They draft the same tokens at the cost of the wider model. New columns have the scale 0, and new rows are noise.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from safetensors import safe_open
from torch import Tensor

from selfspec_cli.early_exit import fitted_weights
from selfspec_cli.early_exit.fingerprint import model_fingerprint
from selfspec_cli.early_exit.fitted_weights import LM_HEAD, FittedWeights

EMBEDDING = "model.embed_tokens.weight"
NOISE_SCALE = 0.002  # of a copy's new rows: nothing reads what they give, but it must stay finite


def parts(name: str, config: dict[str, Any]) -> tuple[list[int], int]:
    """(rows of each part of a fused linear layer, columns)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    kinds = {"qkv_proj": ([q, kv, kv], hidden), "o_proj": ([hidden], q), "gate_up_proj": ([inner, inner], hidden),
             "down_proj": ([hidden], inner), LM_HEAD: ([config["vocab_size"]], hidden)}  # fmt: skip
    return kinds[name.rpartition(".")[2]]


def spread(tensor: Tensor, old: list[int], new: list[int], fill: Tensor) -> Tensor:
    """`fill` with the rows of `tensor`, part by part, at the beginning of each part; what is left of their columns is
    0. It is written to."""
    at = start = 0
    for rows, wide_rows in zip(old, new, strict=True):
        fill[start : start + rows] = 0
        fill[start : start + rows, : tensor.shape[1]] = tensor[at : at + rows]
        at, start = at + rows, start + wide_rows
    return fill


def widened_copy(copy: dict[str, Tensor], name: str, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a copy of one linear layer, for the wide model. Each has a row for an output, and as many columns
    for one group of inputs as for any other."""
    (old_rows, old_columns), (rows, columns) = parts(name, old), parts(name, new)
    reads = name.endswith(("qkv_proj", "gate_up_proj"))  # whose new outputs nothing reads
    made = {}
    for key, tensor in copy.items():
        shape = (sum(rows), tensor.shape[1] * columns // old_columns)
        if tensor.is_floating_point():
            fill = torch.full(shape, NOISE_SCALE if reads else 0.0, dtype=tensor.dtype)
        else:
            limits = torch.iinfo(tensor.dtype)
            fill = torch.randint(limits.min, limits.max, shape, dtype=tensor.dtype)
        made[key] = spread(tensor, old_rows, rows, fill)
    return made


def widened_fitted(fitted: FittedWeights, old: dict[str, Any], new: dict[str, Any], fingerprint: str) -> FittedWeights:
    """Every copy for a model of the config `new`, which has the fingerprint."""
    copies = {name: widened_copy(copy, name, old, new) for name, copy in fitted.copies.items()}
    return FittedWeights(replace(fitted.about, fingerprint=fingerprint), copies)


def fingerprint_of(model: Path, config: dict[str, Any]) -> str:
    """As an engine that has loaded the checkpoint says it."""
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            if EMBEDDING in opened.keys():  # noqa: SIM118 (no mapping)
                return model_fingerprint(config, [("embed_tokens.weight", opened.get_tensor(EMBEDDING))])
    raise SystemExit(f"{model}: no {EMBEDDING} in its safetensors files")


def main() -> None:
    """Read the file, write the wider one."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--weights", type=Path, required=True, help="of selfspec fit-weights")
    options.add_argument("--source", type=Path, required=True, help="the small model that they were fitted on")
    options.add_argument("--model", type=Path, required=True, help="the widened model")
    options.add_argument("--out", type=Path, required=True)
    chosen = options.parse_args()
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (chosen.source, chosen.model))
    fitted = fitted_weights.load(
        chosen.weights, fitted_weights.read_about(chosen.weights).kind, fingerprint_of(chosen.source, old)
    )
    torch.manual_seed(0)
    print(fitted_weights.save(chosen.out, widened_fitted(fitted, old, new, fingerprint_of(chosen.model, new))))


if __name__ == "__main__":
    main()
