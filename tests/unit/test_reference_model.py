"""The reference model's own code against transformers, its data against itself, its checkpoint, and wider copies."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

FOLDER = Path(__file__).parents[2] / "experiments" / "reference_model"
MODEL = FOLDER / "model"


@pytest.fixture(autouse=True)
def scripts(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("architecture", "data", "train", "widen"):
        sys.modules.pop(name, None)


def test_exported_checkpoint_gives_the_logits_of_the_training_code(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from architecture import TINY, Llama, export

    torch.manual_seed(0)
    model = Llama(TINY)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_((weight + 0.1 * torch.randn_like(weight)).bfloat16())
    export(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(TINY.vocab, (2, TINY.positions))
    with torch.no_grad():
        ours = model.logits(model.hidden_states(ids, (TINY.layers,))[0])
        other = theirs(ids)
    assert other.logits.std() > 0.1
    torch.testing.assert_close(ours, other.logits, atol=1e-4, rtol=1e-4)


def test_layer_dropout_skips_a_layer_for_one_sample_only() -> None:
    from architecture import TINY, Llama
    from train import layer_dropout_rates

    model = Llama(TINY)
    ids = torch.randint(TINY.vocab, (2, 16))
    keep = torch.ones(TINY.layers, 2)
    keep[2, 1] = 0
    whole = model.hidden_states(ids, (2, 3))
    before, after = model.hidden_states(ids, (2, 3), keep=keep)
    torch.testing.assert_close(after[0], whole[1][0])
    torch.testing.assert_close(after[1], before[1])
    assert not torch.allclose(whole[1][1], before[1])
    rates = layer_dropout_rates(TINY.layers, 0.1)
    assert rates[0] == 0 and rates[-1].item() == pytest.approx(0.1) and (rates.diff().diff() > 0).all()


def test_losses_are_cross_entropy_and_the_final_layer_is_not_taught() -> None:
    from train import losses

    torch.manual_seed(1)
    norm, embedding = torch.ones(8), torch.randn(11, 8)
    states = [torch.randn(2, 5, 8, requires_grad=True) for _ in range(2)]
    targets = torch.randint(11, (2, 5))

    def logits(h):
        return torch.nn.functional.rms_norm(h, (8,), norm, 1e-5) @ embedding.T

    hard = [torch.nn.functional.cross_entropy(logits(h).flatten(0, 1), targets.flatten()) for h in states]
    torch.testing.assert_close(losses(states, norm, embedding, 1e-5, targets, 0.0), torch.stack(hard))
    soft = losses(states, norm, embedding, 1e-5, targets, 1.0)
    teacher, student = logits(states[1]).softmax(-1), logits(states[0]).log_softmax(-1)
    torch.testing.assert_close(soft[0], -(teacher * student).sum(-1).mean())
    soft[0].backward()
    assert states[1].grad is None or not states[1].grad.any()
    assert states[0].grad.any()


def test_batches_depend_on_the_step_alone() -> None:
    pytest.importorskip("numpy"), pytest.importorskip("tokenizers")
    from data import Windows

    stream = torch.arange(1000)
    forward = Windows(stream, length=16, batch=4, seed=3)
    steps = [forward(step) for step in range(40)]
    again = Windows(stream, length=16, batch=4, seed=3)
    assert all(torch.equal(again(step), steps[step]) for step in reversed(range(40)))
    assert all(window.shape == (4, 17) and (window.diff() == 1).all() for window in steps)
    first_epoch = torch.cat([batch[:, 0] for batch in steps[: forward.batches]])
    assert len(first_epoch.unique()) == len(first_epoch)


def test_checkpoint_on_disk_is_whole_and_small() -> None:
    from architecture import Shape, hugging_face_config

    files = [path for path in MODEL.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 32_000_000
    assert all(path.stat().st_size < 16_000_000 for path in files)
    assert json.loads((MODEL / "config.json").read_text()) == hugging_face_config(Shape())
    index = json.loads((MODEL / "model.safetensors.index.json").read_text())
    assert {path.name for path in MODEL.glob("*.safetensors")} == set(index["weight_map"].values())


@pytest.mark.slow
def test_trained_model_predicts_held_out_text_and_its_exits_agree() -> None:
    """A few thousand tokens, on the CPU: wide bounds around the figures in metrics.json."""
    tokenizers = pytest.importorskip("tokenizers")
    from architecture import Llama, Shape
    from safetensors.torch import load_file
    from train import evaluate

    from selfspec_cli.texts import library

    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    windows = library.token_windows(lambda text: tokenizer.encode(text).ids, library.held_out_text(), 1024, 4, seed=7)
    model = Llama(Shape())
    weights = {k: v for path in MODEL.glob("*.safetensors") for k, v in load_file(path).items()}
    model.load_state_dict({name.removeprefix("model."): weight for name, weight in weights.items()})
    stream = torch.tensor([id for window in windows for id in window] + [0])
    here = evaluate(model, stream, torch.float32)
    reported = json.loads((FOLDER / "metrics.json").read_text())["early_exit"]["held_out"]
    assert here["perplexity"][-1] == pytest.approx(reported["perplexity"][-1], rel=0.4)
    assert here["agreement"][5] == pytest.approx(reported["agreement"][5], abs=0.08)


# ---- the widened model ----------------------------------------------------------------------------------------------


def widened(source, out, hidden, intermediate, *words):
    """The model of `source`, and its wider copy in `out`, which widen.py makes."""
    from transformers import AutoModelForCausalLM

    sizes = ["--hidden", str(hidden), "--intermediate", str(intermediate), "--out", out]
    subprocess.run([sys.executable, FOLDER / "widen.py", *words, *sizes], check=True, capture_output=True)
    return [AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval() for place in (source, out)]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_a_model_of_another_shape_is_widened_exactly(tmp_path, tied):
    """Three query heads for a KV head, as SmolLM2 has, and an lm_head of its own or none; fp32, to rounding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
        rms_norm_eps=1e-5,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:  # norms that are not all ones
        layer.input_layernorm.weight.normal_(1, 0.3)
    model.save_pretrained(tmp_path / "narrow")
    (tmp_path / "narrow" / "chat_template.jinja").write_text("{{ messages }}")
    narrow, wide = widened(tmp_path / "narrow", tmp_path / "wide", 384, 512, "--source", tmp_path / "narrow")
    ids = torch.arange(128).view(4, 32)
    torch.testing.assert_close(wide(input_ids=ids).logits, narrow(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    assert wide.model.layers[0].mlp.gate_proj.weight.shape == (512, 384)
    assert float(wide.model.layers[0].self_attn.q_proj.weight[96:].std()) > 0.01  # what is new is not zero
    assert (tmp_path / "wide" / "chat_template.jinja").is_file()


@pytest.mark.parametrize(
    ("change", "width", "message"),
    [({"attention_bias": True}, 256, "biases"), ({}, 512, "hidden = 512: allowed are 256 times 1, 4")],
)
def test_a_model_that_cannot_be_widened_is_refused(change, width, message):
    import widen

    config = json.loads((MODEL / "config.json").read_text()) | change
    with pytest.raises(ValueError, match=message):
        widen.widened_config(config, width, 4096)
