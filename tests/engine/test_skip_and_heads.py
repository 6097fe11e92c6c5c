"""Method `skip` is the truncated model; exit heads are loaded, checked, and paid for once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from exit_heads import lens_head, lsq_head
from harness import Counts, greedy, layer_skip, live
from models import LAYERS, VOCAB
from transformers import AutoModelForCausalLM

from selfspec_cli.early_exit.artifact import model_fingerprint, save_head
from selfspec_cli.early_exit.head_metadata import HeadMetadata
from selfspec_cli.early_exit.head_module import ExitHead

EXIT = LAYERS // 2
HIDDEN = 64
SOME = range(0, 32, 4)


def from_transformers(path: Path) -> Any:
    # The fused attention of transformers leaves out Gemma 2's soft-capping.
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


# ---- method skip ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layer"), [("llama", 1), ("llama", EXIT), ("gemma2", 3)])
def test_skip_is_the_truncated_model(expected, name, layer):
    """Prompt log-probabilities equal those of a transformers model of which all later layers were removed."""
    want = expected(name)
    with live(want.path, {"method": "skip", "layer_skip": layer}) as engine:
        scored = engine.generate(want.prompts, greedy(1, prompt_logprobs=0))
        assert engine.call("early_exit_counters") is None
        with pytest.raises(AssertionError, match="differ from the baseline"):
            want.check(engine, SOME)
    model = from_transformers(want.path)
    model.model.layers = model.model.layers[:layer]
    model.config.num_hidden_layers = layer
    for prompt, output in zip(want.prompts, scored, strict=True):
        if len(prompt) == 1:
            continue
        with torch.no_grad():
            exact = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
        got = [scores[token].logprob for token, scores in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        assert got == pytest.approx([float(exact[i, token]) for i, token in enumerate(prompt[1:])], abs=1e-3)


def test_skip_with_a_head_speaks_through_it(expected, tmp_path):
    """An lsq head whose weight is zero but for one row makes every prediction that token."""
    want = expected("llama")
    only = lsq_head(torch.zeros(VOCAB, HIDDEN), torch.eye(VOCAB)[7])
    path = save_head(tmp_path / "one.safetensors", only, about(only, want.path))
    with live(want.path, {"method": "skip", "layer_skip": EXIT, "lsq_head_path": str(path)}) as engine:
        outputs = engine.generate(want.prompts[:2], greedy(1))
    assert [output.outputs[0].token_ids[0] for output in outputs] == [7, 7]


# ---- exit heads -----------------------------------------------------------------------------------------------------


def about(head: ExitHead, path: Path, **changes: Any) -> HeadMetadata:
    """Metadata of a head of the model in `path`, its fingerprint taken through transformers, not through vLLM."""
    model = from_transformers(path)
    mark = model_fingerprint(model.config.to_dict(), model.model.embed_tokens.weight)
    rank = len(head.tensors["down"]) if "down" in head.tensors else None
    facts = {"kind": head.kind.name, "layer": EXIT, "hidden": HIDDEN, "vocab_size": VOCAB, "rank": rank}
    return HeadMetadata(**{**facts, "fingerprint": mark, **changes})


def own_bytes(head: ExitHead) -> int:
    """What a head stores, and the rows of the lm_head that it gathers."""
    stored = sum(tensor.nbytes for tensor in [*head.parameters(), *head.buffers()])
    gathered = 0 if head.vocab_ids is None or head.has_rows else len(head.vocab_ids) * HIDDEN * 4
    return stored + gathered


@pytest.fixture(scope="module")
def lens(expected) -> tuple[Counts, dict[str, int]]:
    """What drafting with the plain lens counts, and the bytes it holds."""
    want = expected("llama")
    with live(want.path, layer_skip(EXIT, 3)) as engine:
        return want.check(engine, SOME), engine.call("early_exit_weights")


def test_the_lens_adds_no_weights(lens, expected):
    """The target is as large as its file; the draft adds nothing."""
    parameters = sum(weight.nbytes for weight in from_transformers(expected("llama").path).parameters())
    assert parameters <= lens[1]["target"] <= parameters + 2 * 4 * 32 * 512  # and the rotary table
    assert lens[1]["draft"] == 0


@pytest.mark.parametrize("small", [True, False], ids=["lens, half of the vocabulary, no file", "lsq of the lm_head"])
def test_head_drafts_losslessly_and_is_paid_for_once(expected, lens, report, tmp_path, small):
    """Heads of other kinds draft in test_fit_heads.py. Those that do not fit are refused in test_verify.py and in
    tests/unit/test_early_exit_artifact.py."""
    want = expected("llama")
    if small:
        head, spec = lens_head(torch.arange(VOCAB // 2)), {"head": "lens", "vocab": VOCAB // 2}
    else:
        head = lsq_head(from_transformers(want.path).lm_head.weight.detach().clone())
        spec = {"head_path": str(save_head(tmp_path / "head.safetensors", head, about(head, want.path)))}
    with live(want.path, layer_skip(EXIT, 3, **spec)) as engine:
        made, weights = want.check(engine, SOME), engine.call("early_exit_weights")
    made.require_both_verdicts()
    report(f"{made.drafted} drafted, {made.accepted} accepted (lens: {lens[0].accepted}), {weights} bytes")
    assert weights == {"target": lens[1]["target"], "draft": own_bytes(head)}
    assert (made == lens[0]) != small  # the head was used; the same draft by another path
