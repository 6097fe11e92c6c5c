"""Closed forms against numpy.linalg.lstsq, streams against one piece, and the ends of every dial."""

import dataclasses
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from exit_heads import lens_head
from refusals import said
from torch.nn import functional as F

from selfspec_cli.config.schema import RunConfig
from selfspec_cli.early_exit.artifact import load_head, save_head, save_pt
from selfspec_cli.early_exit.equations import FitError, NormalEquations, _row_blocks
from selfspec_cli.early_exit.errors import HeadError
from selfspec_cli.early_exit.fitting import (
    agreement,
    choose_ridge,
    fit_head,
    fit_scale,
    log_frequencies,
    scaled,
    translator_target,
)
from selfspec_cli.early_exit.head_metadata import HeadMetadata
from selfspec_cli.early_exit.head_module import ExitHead, with_draft_vocabulary
from selfspec_cli.early_exit.heads import HeadSpec
from selfspec_cli.early_exit.resolved import FLAT_PERPLEXITY, FLAT_VOCABULARY, flat_head_warning
from selfspec_cli.early_exit.settings import GateConfig, HeadConfig
from selfspec_cli.stages import fit, preflight

LSQ, TRANSLATOR = HeadSpec("lsq"), HeadSpec("translator")
N, HIDDEN, VOCAB = 300, 8, 13
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, HIDDEN, generator=GENERATOR, dtype=torch.float64) @ torch.diag(
    torch.logspace(-1, 1, HIDDEN).double()
)
X = X + torch.linspace(-2, 2, HIDDEN).double()  # means far from 0, as hidden states have them
MAP = torch.randn(HIDDEN, HIDDEN, generator=GENERATOR, dtype=torch.float64)
Z = X + X @ MAP.T + 0.3 + 0.1 * torch.randn(N, HIDDEN, generator=GENERATOR, dtype=torch.float64)
IDS = torch.randint(0, VOCAB, (N,), generator=GENERATOR)
ONE_HOT = torch.nn.functional.one_hot(IDS, VOCAB).double()
LM_HEAD = torch.randn(VOCAB, HIDDEN, generator=GENERATOR, dtype=torch.float64)


def lm_head(z):
    return z @ LM_HEAD.to(z.dtype).T


def equations(target, bias=False, x=X, chunk=N):
    outputs = target.shape[1] if target.is_floating_point() else VOCAB
    sums = NormalEquations(HIDDEN, outputs, bias=bias)
    for start in range(0, len(x), chunk):
        sums.update(x[start : start + chunk], target[start : start + chunk])
    return sums


def lstsq(x, y, bias, ridge=0.0):
    """Ridge regression as numpy would have it: rows sqrt(lambda) I appended, a column of ones for the bias."""
    x, y = x.numpy(), y.numpy()
    centred = x - x.mean(0) if bias else x
    strength = math.sqrt(ridge * (centred**2).sum(0).mean())
    rows = np.hstack([strength * np.eye(HIDDEN), np.zeros((HIDDEN, int(bias)))])
    a = np.vstack([np.hstack([x, np.ones((len(x), int(bias)))]), rows])
    b = np.vstack([y, np.zeros((HIDDEN, y.shape[1]))])
    solution = np.linalg.lstsq(a, b, rcond=None)[0]
    weight, intercept = solution[:HIDDEN].T, solution[HIDDEN] if bias else 0.0
    return weight, intercept, ((y - x @ weight.T - intercept) ** 2).mean()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("ridge", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("kind", ["tokens", "dense"])
def test_closed_form_is_numpys(kind, ridge, bias):
    target, y = (IDS, ONE_HOT) if kind == "tokens" else (translator_target(X, Z), Z - X)
    weight, intercept, report = equations(target, bias).solve(ridge)
    want, want_intercept, want_residual = lstsq(X, y, bias, ridge)
    np.testing.assert_allclose(weight.numpy(), want, rtol=1e-6, atol=1e-9)
    if bias:
        np.testing.assert_allclose(intercept.numpy(), want_intercept, rtol=1e-6, atol=1e-9)
    else:
        assert intercept is None
    assert report.residual == pytest.approx(want_residual, rel=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_condition_and_baseline(bias):
    x = X - X.mean(0) if bias else X
    y = ONE_HOT - ONE_HOT.mean(0) if bias else ONE_HOT
    report = equations(IDS, bias).solve()[2]
    assert report.condition == pytest.approx(np.linalg.cond((x.T @ x).numpy()), rel=1e-6)
    assert report.baseline == pytest.approx(y.square().mean().item(), rel=1e-9)
    assert 0 < report.residual < report.baseline
    shifted = equations(IDS, bias).solve(0.5)[2]
    moment = x.T @ x
    regularised = moment + 0.5 * moment.diagonal().mean() * torch.eye(HIDDEN)
    assert shifted.condition == pytest.approx(np.linalg.cond(regularised.numpy()), rel=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 299])
@pytest.mark.parametrize("target", [IDS, Z - X], ids=["tokens", "dense"])
def test_a_stream_is_one_piece(target, chunk):
    whole, parts = equations(target, True).solve(1e-3), equations(target, True, chunk=chunk).solve(1e-3)
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-9, atol=1e-12)


def test_solving_between_updates_changes_nothing():
    sums = equations(IDS[:150], x=X[:150])
    sums.solve()
    sums.update(X[150:], IDS[150:])
    weight, _, report = sums.solve()
    want = equations(IDS).solve()
    torch.testing.assert_close(weight, want[0])
    assert report.condition == pytest.approx(want[2].condition)


@pytest.mark.parametrize("rank", [1, 3])
def test_low_rank_is_the_best_fit_of_its_rank(rank):
    """Reduced-rank regression by its definition: the SVD of the fitted values, and no nearby weight does better."""
    sums = equations(Z - X)
    down, up, _, report = sums.solve_low_rank(rank)
    full = sums.solve()[0]
    _, _, right = torch.linalg.svd(X @ full.T, full_matrices=False)
    torch.testing.assert_close(up @ down, right[:rank].T @ right[:rank] @ full, rtol=1e-7, atol=1e-7)

    def loss(d, u):
        return (Z - X - X @ (u @ d).T).square().mean().item()

    assert report.residual == pytest.approx(loss(down, up), rel=1e-6)
    assert report.residual > sums.solve()[2].residual
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        step = 1e-3 * torch.randn(rank, HIDDEN, generator=generator, dtype=torch.float64)
        other = 1e-3 * torch.randn(HIDDEN, rank, generator=generator, dtype=torch.float64)
        assert loss(down + step, up + other) > report.residual
    assert (sum(t.numel() for t in (down, up))) == 2 * HIDDEN * rank


@pytest.mark.parametrize("rank", [None, 3])
def test_an_infinite_ridge_is_the_lens(rank):
    head, _ = fit_head(HeadSpec("translator", rank=rank), equations(translator_target(X, Z)), 1e12)
    torch.testing.assert_close(head.logits(X.float(), lm_head), lens_head().logits(X.float(), lm_head))
    shifted, _ = fit_head(HeadSpec("translator", rank=rank), equations(translator_target(X, Z), bias=True), 1e12)
    torch.testing.assert_close(shifted.transform(X.float()), (X + (Z - X).mean(0)).float())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_states_are_named_by_token(bad):
    for column in (0, 1):
        pair = [X.clone(), Z.clone()]
        pair[column][123, 4] = bad
        sums = equations(Z[:100], x=X[:100])
        before = sums.solve()[0]
        with pytest.raises(FitError, match=rf"token 123 .* {bad}"):
            sums.update(pair[0][100:], pair[1][100:])
        assert sums.count == 100
        assert torch.equal(sums.solve()[0], before)


def test_large_finite_states_are_not_refused():
    sums = NormalEquations(2, 3)
    sums.update(torch.full((4, 2), 3e38), torch.zeros(4, dtype=torch.int64))
    assert sums.count == 4


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_foreign_token_ids_are_named(wrong):
    ids = IDS.clone()
    ids[42] = wrong
    with pytest.raises(FitError, match=f"target {wrong} of token 42 .* 0 to {VOCAB - 1}"):
        equations(ids)


def test_shapes_that_do_not_fit():
    sums = NormalEquations(HIDDEN, VOCAB)
    for x, y in ((X[:, :3], IDS), (X, IDS[:3]), (X, Z), (X[0], IDS[:1])):
        assert "shape" in said(FitError, sums.update, x, y)
    assert "[13, 8]; expected [hidden, hidden]" in said(HeadError, fit_head, TRANSLATOR, equations(IDS), 1.0)
    for rank in (0, HIDDEN + 1):
        assert "1 to 8" in said(FitError, equations(Z).solve_low_rank, rank)


@pytest.mark.parametrize(("pairs", "bias"), [(HIDDEN - 1, False), (HIDDEN, True), (0, False)])
def test_too_few_pairs_need_a_ridge(pairs, bias):
    sums = equations(IDS[:pairs], bias, x=X[:pairs])
    assert f"{pairs} pairs are fewer than the {HIDDEN + bias} unknowns" in said(FitError, sums.solve)
    if pairs:
        assert torch.isfinite(sums.solve(1e-6)[0]).all()


def test_states_that_do_not_span_need_a_ridge_that_is_not_lost_in_rounding():
    flat = X.clone()
    flat[:, 1] = flat[:, 0]
    assert "ridge" in said(FitError, equations(IDS, x=flat).solve)
    assert torch.isfinite(equations(IDS, x=flat).solve(1e-6)[0]).all()
    sums = NormalEquations(2, 3)
    sums.update(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(FitError, match=r"are singular at ridge 1e-300 \(condition .*\); give a larger ridge$"):
        sums.solve(1e-300)  # which is lost in rounding


@pytest.mark.parametrize("ridge", [-1.0, math.nan, math.inf])
def test_bad_ridges(ridge):
    assert "ridge" in said(FitError, equations(IDS).solve, ridge)


def test_choose_ridge_takes_the_best_on_held_out_data():
    x, target = X[:20].float(), lm_head(Z).argmax(-1)  # few pairs: hardly any ridge overfits, a huge one underfits
    sums = equations(translator_target(X[:20], Z[:20]), x=x)
    held_out = [(X[20:160].float(), target[20:160]), (X[160:].float(), target[160:])]
    ridges = (1e3, 0.0, 1e-6, 1e-3)
    fits = {ridge: fit_head(TRANSLATOR, sums, ridge) for ridge in ridges}
    scores = {ridge: agreement(head, held_out, lm_head) for ridge, (head, _) in fits.items()}
    head, report = choose_ridge(fits.__getitem__, iter(held_out), lm_head, ridges)
    assert (head, report) == fits[report.ridge]
    assert scores[report.ridge] == max(scores.values()) > scores[1e3]


def test_choose_ridge_passes_over_ridges_too_small_for_the_data():
    sums = equations(translator_target(X[:5], Z[:5]), x=X[:5])
    batches = [(X.float(), IDS)]
    fit = partial(fit_head, TRANSLATOR, sums)
    assert choose_ridge(fit, batches, lm_head, (0.0, 0.1))[1].ridge == 0.1
    assert "fewer" in said(FitError, choose_ridge, fit, batches, lm_head, (0.0,))
    assert "held-out" in said(FitError, choose_ridge, fit, [], lm_head, (0.1,))


def test_ties_between_ridges_go_to_the_larger():
    sums = equations(translator_target(X, Z))
    never = [(X.float(), torch.full((N,), -1))]
    assert choose_ridge(partial(fit_head, TRANSLATOR, sums), never, lm_head, (0.1, 1.0, 0.5))[1].ridge == 1


def test_agreement_counts_full_ids():
    ids = torch.tensor([2, 5, 7])
    small = with_draft_vocabulary(lens_head(), ids)
    target = ids[lm_head(X)[:, ids].argmax(-1)]
    assert agreement(small, [(X, target)], lm_head) == 1.0


def test_states_come_to_a_heads_own_precision():
    """Models collect them in 16 bits, and what is fitted is not."""
    head = fit_head(LSQ, equations(IDS), 1e-3)[0].double()
    assert agreement(head, [(X.half(), IDS)], lm_head) == agreement(head, [(X.half().double(), IDS)], lm_head)


def test_blocks_of_rows_are_all_rows_once():
    for rows, width in ((1, 1), (10, 2**24), (7, 2**27), (5, 2**25)):
        covered = [row for block in _row_blocks(rows, width) for row in range(rows)[block]]
        assert covered == list(range(rows))
        assert all((block.stop - block.start) * width <= max(2**26, width) for block in _row_blocks(rows, width))


# ---- A scale and a prior make probabilities of a least-squares head's outputs ----------------------------------------


WIDTH, TOKENS, PAIRS = 16, 120, 6000
FLAT = HeadMetadata("lsq", 3, WIDTH, TOKENS, target="next_token")


def _pairs(seed, count, skew=1.5):
    """States, and tokens drawn from a softmax model of them in which some tokens are far more frequent."""
    model = torch.Generator().manual_seed(0)
    weight = torch.randn(TOKENS, WIDTH, generator=model)
    bias = skew * torch.randn(TOKENS, generator=model)
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, WIDTH, generator=draw)
    p = (x @ weight.T + bias).softmax(-1)
    return x, torch.multinomial(p, 1, generator=draw)[:, 0]


def _solved(bias=False):
    sums = NormalEquations(WIDTH, TOKENS, bias=bias)
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
    assert before > 0.8 * TOKENS, "as solved it is flat"
    assert after < 0.4 * before
    assert found.nats < found.nats_before


def test_no_other_scale_and_prior_is_better():
    head, counts = _solved()
    found = fit_scale(head, counts, [_pairs(2, 2000)])
    x, target = _pairs(2, 2000)
    prior = log_frequencies(counts)
    assert found.prior, "both are fitted here"
    assert found.agreement == float((scaled(head, counts, found).logits(x).argmax(-1) == target).double().mean())
    for scale, weight in [(2, 0), (-2, 0), (0, 0.1), (0, -0.1)]:
        logits = (found.scale + scale) * head.logits(x) + (found.prior + weight) * prior
        assert float(F.cross_entropy(logits, target)) > found.nats
    assert float(F.cross_entropy(found.scale * head.logits(x) + found.prior * prior, target)) == pytest.approx(
        found.nats, rel=1e-5
    )


def test_without_held_out_pairs_or_where_outputs_say_the_opposite_there_is_no_scale():
    head, counts = _solved()
    assert "no held-out" in said(FitError, fit_scale, head, counts, [])
    flat = torch.zeros_like(counts)
    assert fit_scale(ExitHead("lsq", {"weight": -head.tensors["weight"]}), flat, [_pairs(2, 1000, skew=0)]) is None


def test_a_file_keeps_both_and_a_draft_vocabulary_keeps_its_part(tmp_path):
    head, counts = _solved()
    found = fit_scale(head, counts, [_pairs(2, 1000)])
    full = scaled(head, counts, found)
    metadata = dataclasses.replace(FLAT, fit=found.to_dict())
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
    fitted = dataclasses.replace(FLAT, fit=found.to_dict())
    of_flat = save_head(tmp_path / "flat" / "layer3_lsq.safetensors", head, FLAT)
    of_scaled = save_head(tmp_path / "scaled" / "layer3_lsq.safetensors", scaled(head, counts, found), fitted)
    for path in (of_flat, of_flat.parent, save_pt(tmp_path, head, FLAT)):
        message = flat_head_warning(gate, path, 3)
        assert "3,850" in message and "results/LOG.md" in message and f"gate {gate!r}" in message
    for path in (of_scaled, of_scaled.parent, save_pt(tmp_path, head, fitted), None, tmp_path / "gone.safetensors"):
        assert flat_head_warning(gate, path, 3) is None
    assert flat_head_warning("none", of_flat, 3) is None, "nothing reads the distribution"
    translator = ExitHead("translator", {"weight": torch.zeros(WIDTH, WIDTH)})
    other = dataclasses.replace(FLAT, kind="translator", target="final_hidden")
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
    path = save_head(tmp_path / "m" / "layer12_lsq.safetensors", head, dataclasses.replace(FLAT, layer=12))
    reports = [{"layer": 12, "head": "lens"}, {"layer": 12, "head": "lsq", "vocab": "full", "path": str(path)}]
    made = fit.save_as_pt(RunConfig(head_dir=str(tmp_path / "ee_head")), fit.FitResult(reports, 1.0))
    assert made == [tmp_path / "ee_head" / "ee_layer12_lsq.pt"]
    assert reports[1]["pt"] == str(made[0])
    assert torch.equal(load_head(made[0]).head.weight, head.weight)


def test_a_sweep_is_warned_of_a_flat_head_once(tmp_path):
    head, _ = _solved()
    file = save_head(tmp_path / "layer3_lsq.safetensors", head, FLAT)
    cfgs = [
        RunConfig(layer=3, gate=GateConfig(kind), head=HeadConfig(path=str(file)), k=k, threshold=tau)
        for kind, tau in (("maxp", 0.5), ("none", None))
        for k in (2, 4)
    ]
    found = [line for line in preflight.warnings(cfgs) if "reads a distribution" in line]
    assert len(found) == 1 and "gate 'maxp'" in found[0]
    assert not preflight.warnings(cfgs[2:])
