"""experiments/views: acceptance in plain PyTorch is that of a draft loop, token by token."""

import argparse
import importlib
import sys

import pytest
import torch
from torch.nn import functional as F

from selfspec_cli.config import paths
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS

LAYERS, LENGTH, PROMPT = 3, 24, 6


@pytest.fixture
def drafting_module(monkeypatch):
    monkeypatch.syspath_prepend(str(paths.experiments_dir() / "views"))
    yield importlib.import_module("drafting")
    for name in ("drafting", "acceptance"):
        sys.modules.pop(name, None)


def tiny():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.3,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def stepwise(model, weights, skipped, tokens, start, count):
    """Logits of `count` draft steps that begin with token `start`: one token at a time through the layers that draft,
    with a cache that holds the full model's keys and values before it. Written without the code under test."""
    config = model.config
    angles = torch.arange(LENGTH)[:, None] / config.rope_parameters["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
    cos, sin = (torch.cat([f(angles), f(angles)], -1) for f in (torch.cos, torch.sin))

    def rotated(x, at):  # [heads, 16]
        return x * cos[at] + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin[at]

    def norm(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weight

    def layer(index, x, at, cache, use):
        part, w = model.model.layers[index], {n: use(index, n) for n in ("q", "k", "v", "o", "gate", "up", "down")}
        h = norm(x, part.input_layernorm.weight)
        q, k, v = ((h @ w[n].T).view(-1, 16) for n in ("q", "k", "v"))
        cache[index][at] = rotated(k, at), v
        keys, values = (torch.stack([cache[index][j][i] for j in range(at + 1)], 1) for i in (0, 1))
        keys, values = keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0)  # [4, at + 1, 16]
        scores = torch.einsum("hd,hnd->hn", rotated(q, at), keys) / 4
        x = x + torch.einsum("hn,hnd->hd", scores.softmax(-1), values).flatten() @ w["o"].T
        h = norm(x, part.post_attention_layernorm.weight)
        return x + (F.silu(h @ w["gate"].T) * (h @ w["up"].T)) @ w["down"].T

    def own(index, name):
        part = model.model.layers[index]
        return getattr(part.mlp if name in ("gate", "up", "down") else part.self_attn, f"{name}_proj").weight

    cache = [{} for _ in range(LAYERS)]
    for at in range(start):
        x = model.model.embed_tokens.weight[tokens[at]]
        for index in range(LAYERS):
            x = layer(index, x, at, cache, own)
    steps = []
    for at in range(start, start + count):
        x = model.model.embed_tokens.weight[tokens[at]]
        for index in range(LAYERS):
            if index not in skipped:
                x = layer(index, x, at, cache, weights or own)
        lm_head = model.lm_head.weight if weights is None else weights(LAYERS, "lm_head")
        steps.append(norm(x, model.model.norm.weight) @ lm_head.T)
    return torch.stack(steps)


def copies_of(model, kind):
    """(index, short name) -> the dequantised copy, made by themselves."""
    weights = DRAFT_WEIGHTS[kind]

    def use(index, name):
        if name == "lm_head":
            weight = model.lm_head.weight
        else:
            part = model.model.layers[index]
            weight = getattr(part.mlp if name in ("gate", "up", "down") else part.self_attn, f"{name}_proj").weight
        return weights.dequantise(weights.quantise(weight), torch.float32)

    return use


@pytest.mark.parametrize(("kind", "skipped"), [("shared", ()), ("shared", (1,)), ("int4", ()), ("int4", (0,))])
@torch.no_grad()
def test_every_pass_is_a_step_of_a_draft_loop(drafting_module, kind, skipped):
    model, tokens = tiny(), torch.randint(64, (LENGTH,), generator=torch.Generator().manual_seed(1))
    weights = None if kind == "shared" else copies_of(model, kind)
    wanted = {start: stepwise(model, weights, skipped, tokens, start, 3) for start in (0, 5, 13)}
    drafting = drafting_module.Drafting(model)
    drafting.set_view(kind, skipped)
    full = drafting.teacher(tokens.unsqueeze(0))
    passes = [drafting.draft(tokens.unsqueeze(0), position)[0] for position in (1, 2, 3)]
    for start, steps in wanted.items():
        for position, logits in enumerate(steps):
            torch.testing.assert_close(passes[position][start + position], logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(drafting.teacher(tokens.unsqueeze(0)), full)  # the model itself is what it was
    drafting.teacher(tokens.unsqueeze(0))  # the same of the last tokens alone: what is before them drafts nothing
    for position in (1, 2, 3):
        logits = drafting.draft(tokens.unsqueeze(0), position, 5)[0]
        torch.testing.assert_close(logits[position - 1], wanted[5][position - 1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits[8 + position - 1], wanted[13][position - 1], rtol=1e-4, atol=1e-4)
    if (kind, skipped) == ("shared", ()):
        torch.testing.assert_close(passes[2], full[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_model_accepts_itself_and_no_stranger(drafting_module):
    model = tiny()
    options = {"max_new_tokens": LENGTH - PROMPT, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = model.generate(torch.arange(1, PROMPT + 1)[None], **options)[0]
    drafting = drafting_module.Drafting(model)
    drafting.set_view("shared")
    answer = drafting_module.Answer.of(drafting, ids, PROMPT, 0.8)
    assert drafting_module.accepted(drafting, answer, 3)["most likely"].eq(1).all()
    assert drafting_module.accepted(drafting, answer, 3, 0.8)["drawn"].gt(0.999).all()
    drafting.set_view("shared", (0, 1))
    both = drafting_module.accepted(drafting, answer, 3, 0.8)
    thinned, drawn = both["most likely"], both["drawn"]
    assert thinned.shape == (LENGTH - 3 - PROMPT + 1, 3) and 0 <= thinned.mean() < 0.9
    assert (thinned[:, 1:] <= thinned[:, :-1]).all()
    assert ((drawn > 0) & (drawn < 1)).any()
    acceptance = importlib.import_module("acceptance")
    rows = acceptance.summary([thinned, thinned], 3)
    assert rows[0]["given_before"] == rows[0]["low"] == rows[0]["high"] == pytest.approx(float(thinned[:, 0].mean()))
    assert rows[2]["all_so_far"] == pytest.approx(float(thinned[:, 2].mean()))


def test_views_are_written_in_four_ways(drafting_module):
    acceptance = importlib.import_module("acceptance")
    kinds = tuple(DRAFT_WEIGHTS)
    assert acceptance.view_of("int8", kinds) == ("int8", (), None)
    assert acceptance.view_of("int4@1,3-4", kinds) == ("int4", (1, 3, 4), None)
    assert acceptance.view_of("14-16", kinds) == ("shared", (14, 15, 16), None)
    assert acceptance.view_of("int4=a/b.safetensors", kinds) == ("int4", (), "a/b.safetensors")
    assert acceptance.views("int4@1,3; int8") == ["int4@1,3", "int8"]
    with pytest.raises(argparse.ArgumentTypeError, match="did you mean 'int8'"):
        acceptance.views("int4,itn8")
