"""What is made of a tiny model of models.py: adapters, the model quantised, the model with eyes."""

import json
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from models import VOCAB, save_tokenizer
from torch import Tensor

RANK = 8  # of adapters
IMAGE = VOCAB - 1  # the token of an image
_SIDE, _PATCH = 28, 14  # of an image: four patches
PATCHES = (_SIDE // _PATCH) ** 2

_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_BITS, _GROUP = 4, 32  # of quantised weights
_WEIGHTS = {"num_bits": _BITS, "type": "int", "strategy": "group", "group_size": _GROUP}
_COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}


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


def _integers(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers from 0 [out, in] and scales [out, groups] of a weight in 4 bits."""
    groups = weight.float().unflatten(1, (-1, _GROUP))
    scale = groups.abs().amax(dim=2, keepdim=True) / 7
    return (groups / scale).round().to(torch.int32).flatten(1) + 2 ** (_BITS - 1), scale.squeeze(2)


def _packed(whole: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Eight integers in 4 bits [..., n] of the last dimension to a word [..., n / 8], the first of `order` lowest."""
    words = whole.unflatten(-1, (-1, 32 // _BITS))[..., list(order)]
    return (words << torch.arange(0, 32, _BITS, dtype=torch.int32)).sum(dim=-1, dtype=torch.int32).contiguous()


def _save_with(model: Path, folder: Path, pack: Callable[[Tensor], dict[str, Tensor]], scheme: dict[str, Any]) -> Path:
    """`model` with the weights of its layers as `pack` makes them, and what its config says of that."""
    from safetensors.torch import load_file, save_file

    weights: dict[str, Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        packed = pack(weight) if name.endswith("_proj.weight") else {"weight": weight}
        weights |= {name.removesuffix("weight") + part: tensor for part, tensor in packed.items()}
    config = json.loads((model / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_quantised(model: Path, folder: Path) -> Path:
    """`model` with its layers' weights in 4 bits, one scale for 32 of a row (compressed-tensors, W4A16)."""

    def pack(weight: Tensor) -> dict[str, Tensor]:
        whole, scale = _integers(weight)
        shape = torch.tensor(weight.shape)
        return {"weight_packed": _packed(whole), "weight_scale": scale.to(weight.dtype), "weight_shape": shape}

    group = {"targets": ["Linear"], "weights": _WEIGHTS | {"symmetric": True, "dynamic": False}}
    scheme = _COMPRESSED | {"format": "pack-quantized", "config_groups": {"group_0": group}}
    return _save_with(model, folder, pack, scheme)


def save_gptq(model: Path, folder: Path) -> Path:
    """`model` with its layers' weights in 4 bits as GPTQ checkpoints hold them."""

    def pack(weight: Tensor) -> dict[str, Tensor]:
        (rows, columns), (whole, scale) = weight.shape, _integers(weight)
        middle = torch.full((columns // _GROUP, rows), 2 ** (_BITS - 1) - 1, dtype=torch.int32)  # one less than it is
        groups = torch.arange(columns, dtype=torch.int32) // _GROUP
        return {
            "qweight": _packed(whole).t().contiguous(),
            "qzeros": _packed(middle),
            "g_idx": groups,
            "scales": scale.t().to(torch.float16).contiguous(),
        }

    scheme = {"quant_method": "gptq", "bits": _BITS, "group_size": _GROUP, "sym": True}
    scheme |= {"desc_act": False, "lm_head": False}
    return _save_with(model, folder, pack, scheme)


def save_awq(model: Path, folder: Path) -> Path:
    """`model` with its layers' weights in 4 bits as AWQ checkpoints hold them: a zero of its own for each group."""

    def pack(weight: Tensor) -> dict[str, Tensor]:
        groups, order = weight.float().unflatten(1, (-1, _GROUP)), (0, 2, 4, 6, 1, 3, 5, 7)
        low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        scale = (high - low) / (2**_BITS - 1)  # [out, groups]
        zero = (-low / scale).round().to(torch.int32)
        whole = (groups / scale.unsqueeze(2)).round().to(torch.int32) + zero.unsqueeze(2)
        whole = whole.clamp(0, 2**_BITS - 1).flatten(1)
        return {
            "qweight": _packed(whole.t(), order),
            "qzeros": _packed(zero.t(), order),
            "scales": scale.t().to(torch.float16).contiguous(),
        }

    scheme = {"quant_method": "awq", "bits": _BITS, "group_size": _GROUP, "zero_point": True, "version": "gemm"}
    return _save_with(model, folder, pack, scheme)


def save_eight_bits(model: Path, folder: Path) -> Path:
    """`model` with its layers' weights in int8, one scale for a row, and tokens rounded likewise as they come
    (compressed-tensors, W8A8)."""

    def pack(weight: Tensor) -> dict[str, Tensor]:
        scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
        return {"weight": (weight.float() / scale).round().to(torch.int8), "weight_scale": scale}

    kind = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**kind, "strategy": "channel", "dynamic": False},
        "input_activations": {**kind, "strategy": "token", "dynamic": True},
    }
    scheme = _COMPRESSED | {"format": "int-quantized", "config_groups": {"group_0": group}}
    return _save_with(model, folder, pack, scheme)


def save_with_eyes(model: Path, folder: Path) -> Path:
    """Idefics3: `model`, a tiny Llama, behind a vision tower of random weights. Its images need no torchvision."""
    import transformers

    language = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    vision = transformers.Idefics3VisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=_SIDE,
        patch_size=_PATCH,
    )
    config = transformers.Idefics3Config(
        vision_config=vision, text_config=language.config, image_token_id=IMAGE, pad_token_id=0, scale_factor=1
    )
    torch.manual_seed(0)
    whole: Any = transformers.Idefics3ForConditionalGeneration(config)
    whole.model.text_model.load_state_dict(language.model.state_dict())
    whole.lm_head.load_state_dict(language.lm_head.state_dict())
    whole.save_pretrained(folder)
    save_tokenizer(folder, "<end_of_utterance>", "<fake_token_around_image>", "<image>")
    size = {"longest_edge": _SIDE}
    images = transformers.Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    transformers.Idefics3Processor(images, tokenizer, image_seq_len=PATCHES).save_pretrained(folder)
    return folder


SEES = (252, 250, 253)  # a picture in a prompt of `save_with_several_positions`: its start, itself, its end
_SHAPES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
_SHAPES += "max_position_embeddings"
_TOWER = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": _PATCH}
SEVERAL_POSITIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VL": (
        {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": _PATCH},
        {"mrope_section": [4, 6, 6]},
    ),
    "Qwen2_5_VL": (
        _TOWER | {"depth": 1, "fullatt_block_indexes": [0], "window_size": 4 * _PATCH},
        {"mrope_section": [4, 6, 6]},
    ),
    "Qwen3VL": (
        _TOWER | {"depth": 2, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        {"mrope_section": [6, 5, 5], "mrope_interleaved": True},
    ),
}
"""Vision tower and rotary embedding of models whose positions have three dimensions (M-RoPE)."""


def save_with_several_positions(
    folder: Path, kind: str = "Qwen2VL", vision: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """A model of SEVERAL_POSITIONS, of random weights. vision: changes to its tower; changes: to its decoder."""
    import transformers
    from architectures import EXIT, SHAPE, _randomise

    tower, rope = SEVERAL_POSITIONS[kind]
    text = {
        **{name: SHAPE[name] for name in _SHAPES.split()},
        "head_dim": SHAPE["hidden_size"] // SHAPE["num_attention_heads"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope},
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    special = dict(zip(("vision_start_token_id", "image_token_id", "vision_end_token_id"), SEES, strict=True))
    config = getattr(transformers, f"{kind}Config")(
        text_config={**text, **changes},
        vision_config={**tower, **(vision or {})},
        tie_word_embeddings=False,
        video_token_id=251,
        **special,
    )
    torch.manual_seed(0)
    model: Any = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _randomise(name, weight, False)
    assert len(model.model.language_model.layers) > EXIT
    model.save_pretrained(folder)
    save_tokenizer(folder, "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|a|>", "<|b|>")
    least = (2 * _PATCH) ** 2  # pixels of what becomes one token
    transformers.Qwen2VLImageProcessorPil(min_pixels=least, max_pixels=16 * least).save_pretrained(folder)
    return folder


def without_video_processor(monkeypatch: Any, kind: str) -> None:
    """Let `kind` read pictures where torchvision, which its processor of videos needs, is not installed."""
    import transformers

    def from_pretrained(cls: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        images = transformers.Qwen2VLImageProcessorPil.from_pretrained(path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        return cls(image_processor=images, tokenizer=tokenizer, video_processor=images)

    processor = getattr(transformers, f"{kind}Processor")
    monkeypatch.setattr(processor, "check_argument_for_proper_class", lambda *_: None)
    monkeypatch.setattr(processor, "from_pretrained", classmethod(from_pretrained))


def without_torchvision(monkeypatch: Any) -> None:
    """Let vLLM import models whose image processors, unused here, import torchvision; in this process alone."""
    import transformers.image_processing_utils  # noqa: F401 (it looks for torchvision itself, so it comes first)

    parent: Any = None
    parts = ("torchvision", "transforms", "v2", "functional")
    for name in (".".join(parts[: n + 1]) for n in range(len(parts))):
        module: Any = ModuleType(name)
        module.__path__, module.__spec__ = [], ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
        if parent is not None:
            setattr(parent, name.rpartition(".")[2], module)
        parent = module


def pictures(count: int, width: int = _SIDE, height: int = _SIDE) -> list[Any]:
    """Images of one colour each."""
    from PIL import Image

    return [Image.new("RGB", (width, height), (37 * n % 256, 91 * n % 256, 17 * n % 256)) for n in range(count)]
