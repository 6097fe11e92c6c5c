"""What is made of a tiny model of models.py: adapters, the model quantised, the model with eyes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from models import VOCAB, save_tokenizer
from torch import Tensor

RANK = 8  # of adapters
IMAGE = VOCAB - 1  # the token that stands for an image
_SIDE, _PATCH = 28, 14  # of an image: four patches
PATCHES = (_SIDE // _PATCH) ** 2

_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_SCHEME = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
}


def save_adapter(folder: Path, model: Path, seed: int) -> Path:
    """An adapter of every projection, strong enough to change most tokens, in the format of the PEFT library."""
    from safetensors.torch import load_file, save_file

    torch.manual_seed(seed)
    weights = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            rows, columns = weight.shape
            place = "base_model.model." + name.removesuffix(".weight")
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, columns) * columns**-0.5
            weights[f"{place}.lora_B.weight"] = torch.randn(rows, RANK) * 0.3 * float(weight.std()) * RANK**0.5
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": _PROJECTIONS, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def save_quantised(model: Path, folder: Path) -> Path:
    """`model` with its layers' weights as 8-bit integers, one scale a row (W8A8 in the compressed-tensors format)."""
    from safetensors.torch import load_file, save_file

    weights: dict[str, Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            weights[name] = weight
            continue
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        weights[name] = (weight / scale).round().to(torch.int8)
        weights[f"{name}_scale"] = scale
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": _SCHEME},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_with_eyes(model: Path, folder: Path) -> Path:
    """LLaVA: `model`, a tiny Llama, behind a vision tower of random weights."""
    import transformers

    language = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=_SIDE,
        patch_size=_PATCH, projection_dim=32,
    )  # fmt: skip
    config = transformers.LlavaConfig(vision_config=vision, text_config=language.config, image_token_id=IMAGE)
    torch.manual_seed(0)
    whole: Any = transformers.LlavaForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(language.model.state_dict())
    whole.lm_head.load_state_dict(language.lm_head.state_dict())
    whole.save_pretrained(folder)
    save_tokenizer(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    image_token = tokenizer.convert_ids_to_tokens(IMAGE)
    images = transformers.CLIPImageProcessor(size={"shortest_edge": _SIDE}, crop_size=_SIDE)
    transformers.LlavaProcessor(
        images, tokenizer, patch_size=_PATCH, vision_feature_select_strategy="default", image_token=image_token,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def pictures(count: int) -> list[Any]:
    """Images of one colour each."""
    from PIL import Image

    return [Image.new("RGB", (_SIDE, _SIDE), (37 * n % 256, 91 * n % 256, 17 * n % 256)) for n in range(count)]
