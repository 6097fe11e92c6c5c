"""LoRA requests beside early exit: drafts are made without the adapter, and each output is the adapted model's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Live, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB

pytestmark = pytest.mark.engine

RANK = 8
PROMPTS = ragged_prompts(12, VOCAB, seed=3)
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
WITH = [None, "one", "two"] * 4
"""The adapter of each request, by turns."""


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
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": kinds, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def adapters(model_dir, tmp_path_factory) -> dict[str | None, Any]:
    from vllm.lora.request import LoRARequest

    root, model = tmp_path_factory.mktemp("adapters"), model_dir("llama")
    made = {
        name: LoRARequest(name, number, str(save_adapter(root / name, model, number)))
        for number, name in enumerate(("one", "two"), 1)
    }
    return {None: None, **made}


def generated(engine: Live, adapters: dict[str | None, Any], names: list[str | None]) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    chosen = [adapters[name] for name in names]
    return tokens(engine.llm.generate(prompts, greedy(64), lora_request=chosen, use_tqdm=False))


@pytest.mark.parametrize("spec", [{}, {"draft_weights": "int8"}], ids=["shared", "int8"])
def test_each_request_has_the_output_of_its_own_adapter(model_dir, adapters, spec):
    path = model_dir("llama")
    with live(path, **LORA) as engine:
        want = generated(engine, adapters, WITH)
        plain = generated(engine, adapters, [None] * len(PROMPTS))
    moved = [got != own for got, own in zip(want, plain, strict=True)]
    assert moved == [name is not None for name in WITH], "the adapters change nothing, or what is not theirs"
    with live(path, layer_skip(LAYERS // 2, 3, **spec), **LORA) as engine:
        assert generated(engine, adapters, WITH) == want
        mixed = engine.counts()
        mixed.require_both_verdicts()
        assert generated(engine, adapters, ["two"] * len(PROMPTS))[2::3] == want[2::3]
        (engine.counts() - mixed).require_both_verdicts()
