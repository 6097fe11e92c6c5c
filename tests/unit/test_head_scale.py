"""A scale and a prior make probabilities of a least-squares head's outputs."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from selfspec_cli.config.schema import RunConfig
from selfspec_cli.early_exit.artifact import load_head, save_head, save_pt
from selfspec_cli.early_exit.fitting import FitError, NormalEquations, fit_head, fit_scale, log_frequencies, scaled
from selfspec_cli.early_exit.head_metadata import HeadMetadata
from selfspec_cli.early_exit.head_module import ExitHead, with_draft_vocabulary
from selfspec_cli.early_exit.heads import HeadSpec
from selfspec_cli.early_exit.resolved import FLAT_PERPLEXITY, FLAT_VOCABULARY, flat_head_warning
from selfspec_cli.early_exit.settings import GateConfig, HeadConfig
from selfspec_cli.stages import fit, preflight

HIDDEN, VOCAB, PAIRS = 16, 120, 6000


def _pairs(seed, count, skew=1.5):
    """States, and tokens drawn from a softmax model of them in which some tokens are far more frequent."""
    model = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN, generator=model)
    bias = skew * torch.randn(VOCAB, generator=model)
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, HIDDEN, generator=draw)
    p = (x @ weight.T + bias).softmax(-1)
    return x, torch.multinomial(p, 1, generator=draw)[:, 0]


def _solved(bias=False):
    sums = NormalEquations(HIDDEN, VOCAB, bias=bias)
    sums.update(*_pairs(1, PAIRS))
    return fit_head(HeadSpec("lsq", bias=bias), sums, 1e-3)[0], sums.target_counts


def _perplexity(head, x, target):
    return float(F.cross_entropy(head.logits(x), target).exp())


@pytest.mark.parametrize("bias", [False, True])
def test_the_perplexity_of_a_scaled_head_falls_on_pairs_that_nothing_was_fitted_on(bias):
    head, counts = _solved(bias)
    found = fit_scale(head, counts, [_pairs(2, 1000), _pairs(3, 500)])
    x, target = _pairs(4, 3000)
    before, after = _perplexity(head, x, target), _perplexity(scaled(head, counts, found), x, target)
    assert before > 0.8 * VOCAB, "as solved it is flat"
    assert after < 0.4 * before
    assert found.nats < found.nats_before


def test_a_scale_alone_changes_no_argmax_and_a_prior_never_costs_agreement():
    head, counts = _solved()
    held_out = [_pairs(2, 1000)]
    found = fit_scale(head, counts, held_out)
    x, target = held_out[0]
    own = float((head.logits(x).argmax(-1) == target).double().mean())
    assert found.scale > 1
    assert found.agreement >= own
    assert found.agreement == float((scaled(head, counts, found).logits(x).argmax(-1) == target).double().mean())


def test_no_other_scale_and_prior_is_better():
    head, counts = _solved()
    found = fit_scale(head, counts, [_pairs(2, 2000)])
    x, target = _pairs(2, 2000)
    prior = log_frequencies(counts)
    assert found.prior, "both are fitted here"
    for scale, weight in [(2, 0), (-2, 0), (0, 0.1), (0, -0.1)]:
        logits = (found.scale + scale) * head.logits(x) + (found.prior + weight) * prior
        assert float(F.cross_entropy(logits, target)) > found.nats
    assert float(F.cross_entropy(found.scale * head.logits(x) + found.prior * prior, target)) == pytest.approx(
        found.nats, rel=1e-5
    )


def test_a_head_whose_outputs_say_the_opposite_stays_as_it_is():
    head, counts = _solved()
    flat = torch.zeros_like(counts)
    assert fit_scale(ExitHead("lsq", {"weight": -head.tensors["weight"]}), flat, [_pairs(2, 1000, skew=0)]) is None


def test_no_held_out_pairs_are_refused():
    head, counts = _solved()
    with pytest.raises(FitError, match="no held-out"):
        fit_scale(head, counts, [])


def test_a_file_keeps_both_and_a_draft_vocabulary_keeps_its_part(tmp_path):
    head, counts = _solved()
    found = fit_scale(head, counts, [_pairs(2, 1000)])
    full = scaled(head, counts, found)
    metadata = HeadMetadata("lsq", 3, HIDDEN, VOCAB, target="next_token", fit=found.to_dict())
    loaded, read = load_head(save_head(tmp_path / "layer3_lsq.safetensors", full, metadata))
    x, _ = _pairs(5, 10)
    torch.testing.assert_close(loaded.logits(x), full.logits(x))
    assert read.fit["scale"] == found.scale
    assert read.spec.name == "lsq", "the prior is no term of the fit, so the name stays"
    ids = torch.tensor([3, 50, 119])
    torch.testing.assert_close(with_draft_vocabulary(loaded, ids).logits(x), full.logits(x)[:, ids])


@pytest.mark.parametrize("gate", ["maxp", "margin", "entropy", "varH"])
def test_a_gate_that_meets_a_flat_head_is_warned_of(gate, tmp_path):
    head, counts = _solved()
    found = fit_scale(head, counts, [_pairs(2, 1000)])
    flat = HeadMetadata("lsq", 3, HIDDEN, VOCAB, target="next_token")
    fitted = dataclasses.replace(flat, fit=found.to_dict())
    of_flat = save_head(tmp_path / "flat" / "layer3_lsq.safetensors", head, flat)
    of_scaled = save_head(tmp_path / "scaled" / "layer3_lsq.safetensors", scaled(head, counts, found), fitted)
    for path in (of_flat, of_flat.parent, save_pt(tmp_path, head, flat)):
        message = flat_head_warning(gate, path, 3)
        assert "3,850" in message and "results/LOG.md" in message and f"gate {gate!r}" in message
    for path in (of_scaled, of_scaled.parent, save_pt(tmp_path, head, fitted), None, tmp_path / "gone.safetensors"):
        assert flat_head_warning(gate, path, 3) is None
    assert flat_head_warning("none", of_flat, 3) is None, "nothing reads the distribution"
    translator = ExitHead("translator", {"weight": torch.zeros(HIDDEN, HIDDEN)})
    other = dataclasses.replace(flat, kind="translator", target="final_hidden")
    assert flat_head_warning(gate, save_head(tmp_path / "t.safetensors", translator, other), 3) is None


def test_the_figure_of_the_warning_is_the_lab_books():
    page = (Path(__file__).parents[2] / "results" / "LOG.md").read_text(encoding="utf-8")
    assert f"perplexity {FLAT_PERPLEXITY:,} of a vocabulary of {FLAT_VOCABULARY:,}" in page


@pytest.mark.parametrize(
    ("corpus", "template", "heads", "doubts"),
    [
        ("stdlib", True, ("lens", "lsq"), 1),
        ("chats.json", True, ("lsq",), 0),
        ("stdlib", False, ("lsq",), 0),
        ("stdlib", True, ("lens",), 0),
    ],
)
def test_a_chat_model_fitted_on_the_standard_library_is_warned_of(corpus, template, heads, doubts):
    found = fit._warnings(SimpleNamespace(has_template=template), fit.Request((2,), heads, corpus=corpus))
    assert len(found) == doubts
    assert all("--corpus" in line for line in found)


def test_the_heads_of_a_fit_are_written_as_pt_too(tmp_path):
    head, _ = _solved()
    path = save_head(
        tmp_path / "m" / "layer12_lsq.safetensors", head, HeadMetadata("lsq", 12, HIDDEN, VOCAB, target="next_token")
    )
    reports = [{"layer": 12, "head": "lens"}, {"layer": 12, "head": "lsq", "vocab": "full", "path": str(path)}]
    made = fit.save_as_pt(RunConfig(head_dir=str(tmp_path / "ee_head")), fit.FitResult(reports, 1.0))
    assert made == [tmp_path / "ee_head" / "ee_layer12_lsq.pt"]
    assert reports[1]["pt"] == str(made[0])
    assert torch.equal(load_head(made[0]).head.weight, head.weight)


def test_a_sweep_is_warned_of_a_flat_head_once(tmp_path):
    head, _ = _solved()
    file = save_head(
        tmp_path / "layer3_lsq.safetensors", head, HeadMetadata("lsq", 3, HIDDEN, VOCAB, target="next_token")
    )
    cfgs = [
        RunConfig(layer=3, gate=GateConfig(kind), head=HeadConfig(path=str(file)), k=k, threshold=tau)
        for kind, tau in (("maxp", 0.5), ("none", None))
        for k in (2, 4)
    ]
    found = [line for line in preflight.warnings(cfgs) if "reads a distribution" in line]
    assert len(found) == 1 and "gate 'maxp'" in found[0]
    assert not preflight.warnings(cfgs[2:])
