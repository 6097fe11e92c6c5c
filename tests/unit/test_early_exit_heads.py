"""Exit heads: each against a matrix written out, with and without a draft vocabulary."""

import pytest
import torch
from exit_heads import lens_head, lsq_head, translator_head

from selfspec_cli.early_exit.errors import HeadError
from selfspec_cli.early_exit.head_module import (
    check_vocab_ids,
    scatter_to_full,
    with_draft_vocabulary,
)

HIDDEN, VOCAB, RANK = 6, 11, 2
IDS = torch.tensor([1, 4, 5, 9])
GENERATOR = torch.Generator().manual_seed(0)


def rand(*shape):
    return torch.randn(*shape, generator=GENERATOR)


X, LM_HEAD = rand(3, HIDDEN), rand(VOCAB, HIDDEN)
W, BIAS = rand(VOCAB, HIDDEN), rand(VOCAB)
FULL, DOWN, UP, SHIFT = rand(HIDDEN, HIDDEN), rand(RANK, HIDDEN), rand(HIDDEN, RANK), rand(HIDDEN)

HEADS = {
    "lens": (lens_head(), X @ LM_HEAD.T),
    "lsq": (lsq_head(W), X @ W.T),
    "lsq with bias": (lsq_head(W, BIAS), X @ W.T + BIAS),
    "translator": (translator_head(FULL), (X + X @ FULL.T) @ LM_HEAD.T),
    "translator with bias": (translator_head(FULL, bias=SHIFT), (X + X @ FULL.T + SHIFT) @ LM_HEAD.T),
    "low rank": (translator_head(down=DOWN, up=UP, bias=SHIFT), (X + X @ (UP @ DOWN).T + SHIFT) @ LM_HEAD.T),
}


def lm_head(z):
    return z @ LM_HEAD.T


@pytest.mark.parametrize("name", HEADS)
def test_logits_by_callable_and_bound(name):
    head, want = HEADS[name]
    torch.testing.assert_close(head.logits(X, lm_head), want)
    torch.testing.assert_close(head.bind(LM_HEAD).logits(X), want)
    ids = torch.tensor([0, 3])
    assert torch.equal(head.to_full_ids(ids), ids)


@pytest.mark.parametrize("name", HEADS)
def test_draft_vocabulary_keeps_the_columns(name):
    head, want = HEADS[name]
    small = with_draft_vocabulary(head, IDS)
    torch.testing.assert_close(small.logits(X, lm_head), want[:, IDS])
    bound = small.bind(LM_HEAD)
    torch.testing.assert_close(bound.logits(X), want[:, IDS])
    assert bound.weight.shape == (len(IDS), HIDDEN)
    assert small.to_full_ids(torch.tensor([[0, 3]])).tolist() == [[1, 9]]
    with pytest.raises(HeadError, match="already"):
        with_draft_vocabulary(small, IDS)


def test_binding_shares_the_models_weight():
    assert lens_head().bind(LM_HEAD).weight is LM_HEAD


def test_scatter_to_full_is_the_lossless_distribution():
    draft = rand(3, len(IDS))
    full = scatter_to_full(draft, IDS, VOCAB)
    outside = [i for i in range(VOCAB) if i not in IDS]
    assert (full[:, outside] == -torch.inf).all()
    torch.testing.assert_close(full.softmax(-1)[:, IDS], draft.softmax(-1))
    assert torch.equal(full.argmax(-1), IDS[draft.argmax(-1)])


@pytest.mark.parametrize(
    ("ids", "word"),
    [
        (torch.tensor([0, 11]), "11 is out of range; allowed: 0 to 10"),
        (torch.tensor([-1, 3]), "-1 is out of range"),
        (torch.tensor([3, 3]), "ascending"),
        (torch.tensor([4, 3]), "ascending"),
        (torch.arange(12), "larger than the vocabulary of 11"),
        (torch.tensor([], dtype=torch.int64), "empty"),
        (torch.tensor([1.0]), "token ids"),
        (torch.zeros(1, 1, dtype=torch.int64), "token ids"),
    ],
)
def test_bad_draft_vocabularies(ids, word):
    with pytest.raises(HeadError, match=word):
        check_vocab_ids(ids, VOCAB)
    with pytest.raises(HeadError, match=word):
        with_draft_vocabulary(lsq_head(torch.zeros(VOCAB, 2)), ids)


@pytest.mark.parametrize(
    "make",
    [
        lambda: lsq_head(W[0]),
        lambda: lsq_head(W, BIAS[:3]),
        lambda: lsq_head(W, vocab_ids=IDS),
        lambda: translator_head(),
        lambda: translator_head(FULL, down=DOWN, up=UP),
        lambda: translator_head(FULL, down=DOWN),
        lambda: translator_head(down=DOWN),
        lambda: translator_head(down=DOWN, up=UP.T),
        lambda: translator_head(W),
        lambda: translator_head(FULL, bias=BIAS),
        lambda: lens_head(torch.tensor([0, VOCAB])).bind(LM_HEAD),
    ],
)
def test_shapes_that_do_not_fit(make):
    with pytest.raises(HeadError):
        make()


def test_rows_that_somebody_else_keeps_are_given_up():
    head = lsq_head(torch.zeros(3, 4), torch.zeros(3), torch.tensor([1, 4, 5]))
    head.drop_rows()
    assert not head.tensors
    assert not list(head.parameters())
    assert head.transform(torch.ones(1, 4)).tolist() == [[1.0] * 4]
    assert head.to_full_ids(torch.tensor([2])).tolist() == [5]
