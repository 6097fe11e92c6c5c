"""What early exit works with, as docs/limits.md says: models and requests that no other file tries."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness import Live, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB
from more_models import (
    IMAGE,
    RANK,
    SEES,
    SEVERAL_POSITIONS,
    pictures,
    save_adapter,
    save_awq,
    save_eight_bits,
    save_gptq,
    save_quantised,
    save_with_eyes,
    save_with_several_positions,
    without_torchvision,
    without_video_processor,
)
from safetensors.torch import load_file
from vllm.lora.request import LoRARequest

EXIT, K = LAYERS // 2, 3


HALF = {"dtype": "float16"}  # vLLM's product with 4-bit weights takes no float32 on a CPU
# With float16, its product for W8A8 ends the process on processors with AMX ("scalar path not implemented").
BRAIN = {"dtype": "bfloat16"} if torch.cpu._is_amx_tile_supported() else HALF


@pytest.mark.parametrize("save", [save_quantised, save_gptq, save_awq, save_eight_bits])
def test_quantised_targets(model_dir, tmp_path, save):
    """What verifies is the quantised model. The draft runs on copies that are made of what its layers multiply by, or
    on its own quantised weights, which is the same for every scheme."""
    from vllm import _custom_ops  # noqa: F401 (loads the operators that are built for this processor)

    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vLLM's build for processors without AVX-512 has no product with 4-bit weights")
    path, prompts = save(model_dir("llama"), tmp_path / "llama"), ragged_prompts(8, VOCAB, seed=5)
    dtype = BRAIN if save is save_eight_bits else HALF
    with live(path, **dtype) as engine:
        want = tokens(engine.generate(prompts, greedy(48)))
    with live(path, layer_skip(LAYERS, K, draft_weights="int8"), **dtype) as engine:
        for kind, least in (("int8", 0.8), ("int4", 0.3)):  # copies of anything else would hardly be accepted
            engine.call("early_exit_set_view", {"layer_skip": LAYERS, "draft_weights": kind})
            counts = engine.gives(prompts, greedy(48), want)
            counts.require_both_verdicts()
            assert counts.accepted > least * counts.drafted, kind
    if save is save_quantised:
        with live(path, layer_skip(EXIT, K), **HALF) as engine:
            engine.gives(prompts, greedy(48), want).require_both_verdicts()


def described(engine: Live, marks: Sequence[int] = (IMAGE,), size: tuple[int, ...] = ()) -> list[list[int]]:
    """What is said of pictures, and of requests without one beside them. marks: tokens of a picture in a prompt."""
    texts = ragged_prompts(8, VOCAB - 16, seed=6)
    prompts: list[dict[str, Any]] = [{"prompt_token_ids": text} for text in texts]
    for prompt, picture in zip(prompts[::2], pictures(4, *size), strict=True):
        prompt["prompt_token_ids"] = [1, *marks, *prompt["prompt_token_ids"]]
        prompt["multi_modal_data"] = {"image": picture}
    return tokens(engine.llm.generate(prompts, greedy(48), use_tqdm=False))


def test_multimodal_models(model_dir, tmp_path):
    """Idefics3: drafts are made of text tokens; the picture is in the keys and values that the verify pass wrote."""
    path = save_with_eyes(model_dir("llama"), tmp_path / "idefics3")
    with live(path, skip_tokenizer_init=False) as engine:
        want = described(engine)
    with live(path, layer_skip(EXIT, K), skip_tokenizer_init=False) as engine:
        assert described(engine) == want
        engine.counts().require_both_verdicts()


@pytest.mark.parametrize("kind", SEVERAL_POSITIONS)
def test_positions_of_several_dimensions(tmp_path, monkeypatch, kind):
    """M-RoPE behind pictures of 4 by 10 tokens, which move the positions of the text by 30, and beside text alone."""
    without_torchvision(monkeypatch)
    without_video_processor(monkeypatch, kind)
    path, size = save_with_several_positions(tmp_path / kind, kind), (112, 280)
    seeing = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    with live(path, **seeing) as engine:
        want = described(engine, SEES, size)
    with live(path, layer_skip(2, K), **seeing) as engine:
        assert described(engine, SEES, size) == want
        counts = engine.counts()
        counts.require_both_verdicts()
        assert counts.accepted > 0.8 * counts.drafted


# ---- LoRA requests: drafts are made without the adapter, and each output is the adapted model's own -----------------

# Few and short: on the CPU a step with adapters takes ten times as long as one without.
ADAPTED, LENGTH = ragged_prompts(6, VOCAB, seed=3), 32
# One slot more than adapters: on the CPU vLLM gives requests without one, beside others, what the last slot holds.
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK}
WITH = [None, "one", "two"] * 2
"""The adapter of each request, alternating."""


def adapted(engine: Live, adapters: dict[str | None, Any], names: list[str | None]) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in ADAPTED]
    chosen = [adapters[name] for name in names]
    return tokens(engine.llm.generate(prompts, greedy(LENGTH), lora_request=chosen, use_tqdm=False))


def test_each_request_has_the_output_of_its_own_adapter(model_dir, tmp_path):
    model, adapters = model_dir("llama"), dict[str | None, Any]({None: None})
    for number, name in enumerate(("one", "two"), 1):
        adapters[name] = LoRARequest(name, number, str(save_adapter(tmp_path / name, model, number)))
    with live(model, **LORA) as engine:
        want = adapted(engine, adapters, WITH)
        plain = adapted(engine, adapters, [None] * len(ADAPTED))
    moved = [got != without for got, without in zip(want, plain, strict=True)]
    assert moved == [name is not None for name in WITH], "the adapters change nothing, or what is not theirs"
    for spec in ({}, {"draft_weights": "int8"}):
        with live(model, layer_skip(LAYERS // 2, 3, **spec), **LORA) as engine:
            assert adapted(engine, adapters, WITH) == want
            mixed = engine.counts()
            mixed.require_both_verdicts()
            assert adapted(engine, adapters, ["two"] * len(ADAPTED))[2::3] == want[2::3]
            (engine.counts() - mixed).require_both_verdicts()


# ---- requests -------------------------------------------------------------------------------------------------------


def test_prompts_given_as_embeddings(expected):
    """Beside prompts of tokens. A runner that takes a draft's place for one of the prompt's (vllm 57356) verifies it
    with another token's embedding."""
    known, size = expected("llama"), 24
    (file,) = known.path.glob("*.safetensors")
    table = load_file(file)["model.embed_tokens.weight"]
    prompts = [
        {"prompt_embeds": table[torch.tensor(ids)]} if place % 2 else {"prompt_token_ids": ids}
        for place, ids in enumerate(known.prompts[:8])
    ]
    with live(known.path, layer_skip(EXIT, K), enable_prompt_embeds=True) as engine:
        given = tokens(engine.llm.generate(prompts, greedy(size), use_tqdm=False))
        engine.counts().require_both_verdicts()
    assert given == [output[:size] for output in known.outputs[:8]]


DRAWN = layer_skip(EXIT, K, draft_sample_method="probabilistic")


@pytest.mark.parametrize("spec", [None, layer_skip(EXIT, K), DRAWN], ids=["plain", "drafting", "drawn drafts"])
def test_seeds_of_prompts_in_pieces(model_dir, spec):
    """Prompts are computed 64 tokens at a time. vLLM rewinds the generator of a seeded request that is inside its
    prompt, which ends an engine on a CPU. Drafts that are drawn are drawn from the request's own generator."""
    prompts = ragged_prompts(6, VOCAB, seed=7)
    assert max(map(len, prompts)) > 128
    seeded = [greedy(16, temperature=0.8, seed=seed) for seed in range(6)]
    with live(model_dir("llama"), spec) as engine:
        if spec is None:
            engine.call("early_exit_split_seeded_prompts")
        together = tokens(engine.generate(prompts, seeded))
        if spec is not None:
            engine.counts().require_both_verdicts()
        assert together == [tokens(engine.generate([one], of))[0] for one, of in zip(prompts, seeded, strict=True)]
