"""An EAGLE-3 head of a small model as the head of the widened one (experiments/reference_model/widen.py).

    python experiments/rivals/widen_eagle3.py --head rivals/eagle3 --model reference_widened --out rivals/eagle3_widened

It drafts the same tokens at the cost of a head of the wider model: what the small head reads and writes is padded with
zeros, its norms are rescaled, and what only ever meets those zeros is filled with noise. The head reads several hidden
states next to each other (`fc`), and the embedding next to the state (the first layer's q, k and v), so these matrices
are widened block by block.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "reference_model"))

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from widen import widen, widened_config

BESIDE_EACH_OTHER = ("fc.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight")
SHARED = ("embed_tokens", "lm_head", "verifier_")  # vLLM takes them from the model that is drafted for


def widened_head(tensors: dict[str, Tensor], old: dict[str, Any], new: dict[str, Any]) -> dict[str, Tensor]:
    """The head's own tensors for a model of `new`. old, new: configs of the head's layer."""
    return {
        name: _blocks(name, weight, old, new) if name.endswith(BESIDE_EACH_OTHER) else widen(name, weight, old, new)
        for name, weight in tensors.items()
        if not name.startswith(SHARED)
    }


def _blocks(name: str, weight: Tensor, old: dict[str, Any], new: dict[str, Any]) -> Tensor:
    """Widen a matrix [out, n * hidden] that multiplies n concatenated vectors."""
    ratio = new["hidden_size"] // old["hidden_size"]
    parts = weight.split(old["hidden_size"], dim=1)
    noise = name != "fc.weight"  # what fc writes is the state, whose new entries must be zeros
    return torch.cat([_block(part, ratio, noise) for part in parts], 1)


def _block(weight: Tensor, ratio: int, noise: bool) -> Tensor:
    rows, columns = weight.shape
    wide = weight.new_zeros(rows * ratio, columns * ratio)
    if noise:
        wide[rows:] = torch.randn(wide[rows:].shape).mul_(0.02).to(weight.dtype)
    wide[:rows, :columns] = weight
    return wide


def main() -> None:
    """Read the head, write the wider one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, required=True, help="what eagle3.py wrote")
    parser.add_argument("--model", type=Path, required=True, help="the widened model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    chosen = parser.parse_args()
    config = json.loads((chosen.head / "config.json").read_text(encoding="utf-8"))
    wide = json.loads((chosen.model / "config.json").read_text(encoding="utf-8"))
    old = config["transformer_layer_config"]
    new = widened_config(old, wide["hidden_size"], wide["intermediate_size"])
    tensors = {name: tensor for file in chosen.head.glob("*.safetensors") for name, tensor in load_file(file).items()}
    torch.manual_seed(0)
    made = widened_head(tensors, old, new)
    config["transformer_layer_config"] = new
    config["speculators_config"]["verifier"]["name_or_path"] = str(chosen.model.absolute())
    chosen.out.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.to(getattr(torch, chosen.dtype)).contiguous() for name, tensor in made.items()},
        chosen.out / "model.safetensors",
        metadata={"format": "pt"},
    )
    (chosen.out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    print(f"{chosen.out}: {sum(tensor.numel() for tensor in made.values()):,} parameters of its own")


if __name__ == "__main__":
    main()
