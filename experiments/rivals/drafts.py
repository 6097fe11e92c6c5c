"""Make draft models from a model itself, to compare with early exit: its first layers, and a 4-bit copy.

    python experiments/rivals/drafts.py --model experiments/reference_model/model --out rivals
    selfspec sweep experiment=rivals

Writes into --out: `firstE`, a model of the first E layers with the model's own norm and lm_head, which drafts the same
tokens as early exit at E; and with --int4 `int4`, all layers with 4-bit weights in the format compressed-tensors
(rounded to nearest, one scale for 32 weights), which vLLM runs with its own kernels.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP, BITS = 32, 4


def main() -> None:
    """Make the drafts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a Llama checkpoint")
    parser.add_argument("--out", type=Path, default=Path("rivals"))
    parser.add_argument("--layers", type=int, nargs="*", default=[3], help="depths of drafts of the first layers")
    parser.add_argument("--int4", action="store_true", help="also all layers with weights of 4 bits")
    chosen = parser.parse_args()
    tensors = {name: tensor for file in chosen.model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    config = json.loads((chosen.model / "config.json").read_text(encoding="utf-8"))
    for depth in chosen.layers:
        if not 0 < depth < config["num_hidden_layers"]:
            raise SystemExit(f"--layers {depth}: the model has {config['num_hidden_layers']} layers; 1 to one less")
        _save(chosen, f"first{depth}", *first_layers(tensors, config, depth))
    if chosen.int4:
        _save(chosen, "int4", *four_bits(tensors, config))
    print(f"{chosen.out}: {', '.join(sorted(path.name for path in chosen.out.iterdir()))}")


def first_layers(
    tensors: dict[str, Tensor], config: dict[str, Any], depth: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, config) of a model of the first `depth` layers."""
    kept = {name: tensor for name, tensor in tensors.items() if _layer(name) < depth}
    return kept, config | {"num_hidden_layers": depth}


def four_bits(tensors: dict[str, Tensor], config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, config) of a model with 4-bit linear layers; embeddings and norms stay."""
    quantised: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            quantised[name] = tensor
            continue
        stem = name.removesuffix("weight")
        quantised[f"{stem}weight_packed"], quantised[f"{stem}weight_scale"] = rounded(tensor)
        quantised[f"{stem}weight_shape"] = torch.tensor(tensor.shape, dtype=torch.int64)
    weights = {"num_bits": BITS, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    quantization_config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    return quantised, config | {"quantization_config": quantization_config}


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weight [out, in] to (eight 4-bit weights in each int32 [out, in / 8], scales [out, in / GROUP]).

    Raises:
        SystemExit: `in` is no multiple of GROUP.
    """
    rows, columns = weight.shape
    if columns % GROUP:
        raise SystemExit(f"a layer of {columns} inputs cannot be cut into groups of {GROUP}")
    grouped = weight.float().view(rows, -1, GROUP)
    scale = (grouped.abs().amax(-1, keepdim=True) / (2 ** (BITS - 1) - 0.5)).clamp_min(1e-12)
    codes = (grouped / scale).round().clamp(-(2 ** (BITS - 1)), 2 ** (BITS - 1) - 1) + 2 ** (BITS - 1)
    eights = codes.view(rows, -1, 32 // BITS).to(torch.int64)
    packed = (eights << (BITS * torch.arange(32 // BITS))).sum(-1)
    signed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return signed, scale.squeeze(-1).to(weight.dtype)


def _layer(name: str) -> int:
    """Return the layer of a tensor; -1 without one."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else -1


def _save(chosen: argparse.Namespace, name: str, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    folder = chosen.out / name
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for pattern in ("tokenizer*", "chat_template.jinja", "generation_config.json"):
        for file in chosen.model.glob(pattern):
            (folder / file.name).write_bytes(file.read_bytes())


if __name__ == "__main__":
    main()
