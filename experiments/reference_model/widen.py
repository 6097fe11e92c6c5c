"""A small Llama at a real model's cost: the same function, with matrices as large as one wants.

    python experiments/reference_model/widen.py --hidden 4096 --intermediate 14336 --out reference_widened
    selfspec bench experiment=gpu_widened

    python experiments/reference_model/widen.py --source smollm2 --hidden 2304 --intermediate 6144 --out smollm2_widened

The source is the reference model unless it is named: any Llama checkpoint in a folder (grouped queries, tied embeddings
or an lm_head of its own; no biases).

Embeddings and what each layer adds to the residual stream are padded with zeros; the norms are rescaled, because they
average over more entries. Rows and columns that only ever meet those zeros are filled with noise, so that the hardware
has numbers to move and multiply. Outputs, accept rates and exits are those of the reference model; the time of a
step is that of a model of the new size. Whatever is measured with it must say that it is widened.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent / "model"


def widened_config(config: dict, hidden: int, intermediate: int) -> dict:
    """The config of the wider model. hidden: a multiple of the old one by a power of 4, so that norms scale exactly."""
    ratio = hidden // config["hidden_size"]
    if ratio * config["hidden_size"] != hidden or ratio not in (1, 4, 16, 64, 256):
        raise ValueError(f"hidden = {hidden}: allowed are {config['hidden_size']} times 1, 4, 16, 64 or 256")
    if intermediate < config["intermediate_size"]:
        raise ValueError(f"intermediate = {intermediate}: must be at least {config['intermediate_size']}")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError("the model has biases, which widening does not know")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config | {
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": config["num_attention_heads"] * ratio,
        "num_key_value_heads": config["num_key_value_heads"] * ratio,
        "rms_norm_eps": config["rms_norm_eps"] / ratio,
    }


def widen(name: str, weight: Tensor, old: dict, new: dict) -> Tensor:
    """One tensor of the checkpoint in its new shape."""
    ratio = new["hidden_size"] // old["hidden_size"]
    if weight.dim() == 1:  # a norm: the mean over zeros too is `ratio` times smaller
        return _padded(weight / ratio**0.5, (new["hidden_size"],), noise=False)
    sizes = {old["hidden_size"]: new["hidden_size"], old["intermediate_size"]: new["intermediate_size"]}
    if "self_attn" in name:
        # One of the sides is heads; more heads of the same kind, in groups of the same size.
        shape = (weight.shape[0] * ratio, weight.shape[1] * ratio)
    elif "embed_tokens" in name or "lm_head" in name:
        shape = (weight.shape[0], new["hidden_size"])
    else:
        shape = (sizes[weight.shape[0]], sizes[weight.shape[1]])
    # What writes to the residual stream must write zeros to its new entries, and must not read the new heads.
    writes = name.endswith(("o_proj.weight", "down_proj.weight")) or "embed_tokens" in name or "lm_head" in name
    return _padded(weight, shape, noise=not writes)


def _padded(weight: Tensor, shape: tuple[int, ...], noise: bool) -> Tensor:
    wide = torch.randn(shape).mul_(0.02).to(weight.dtype) if noise else weight.new_zeros(shape)
    if noise:
        # New outputs may be anything (nothing reads them); new inputs are zero; only the old corner matters.
        wide[: weight.shape[0]] = 0
    wide[tuple(slice(size) for size in weight.shape)] = weight
    return wide


def shards(source: Path, old: dict, new: dict) -> Iterator[dict[str, Tensor]]:
    """The widened tensors, a few layers at a time."""
    weights = {
        name: tensor for file in sorted(source.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    part: dict[str, Tensor] = {}
    for name in sorted(weights):
        part[name] = widen(name, weights[name], old, new).contiguous()
        if sum(tensor.nbytes for tensor in part.values()) > 2**31:
            yield part
            part = {}
    yield part


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--hidden", type=int, default=4096)
    options.add_argument("--intermediate", type=int, default=14336)
    options.add_argument("--source", type=Path, default=HERE)
    options.add_argument("--out", type=Path, required=True)
    chosen = options.parse_args()
    old = json.loads((chosen.source / "config.json").read_text())
    new = widened_config(old, chosen.hidden, chosen.intermediate)
    chosen.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for pattern in ("*token*.json", "chat_template.jinja", "generation_config.json"):
        for file in chosen.source.glob(pattern):
            shutil.copy(file, chosen.out)
    (chosen.out / "config.json").write_text(json.dumps(new, indent=2))
    total, places = 0, {}
    for number, part in enumerate(shards(chosen.source, old, new)):
        file = f"model-{number:05d}.safetensors"
        save_file(part, chosen.out / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
        total += sum(tensor.nbytes for tensor in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (chosen.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    print(f"{chosen.out}: {total / 2**30:.2f} GiB, hidden {old['hidden_size']} -> {new['hidden_size']}")


if __name__ == "__main__":
    main()
