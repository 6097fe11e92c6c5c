"""Exit heads: from the normed exit hidden state to draft logits.

Throughout, x is the exit hidden state after the model's final norm, [N, hidden]; z the same at the last layer;
V the vocabulary size and V' the size of a draft vocabulary (V' = V without one).

    lens         lm_head(x)                        nothing to store (nostalgebraist's logit lens, 2020)
    lsq          x @ weight^T + bias               weight [V', hidden], least squares to tokens
    translator   lm_head(x + f(x))                 f affine, full rank or rank r (the tuned lens, arXiv:2303.08112)

A draft vocabulary is `vocab_ids`, int64 [V'] ascending: draft id i stands for token vocab_ids[i].
Heads hold fp32 weights as fitted; call `head.to(device, dtype)` before use, so that weights and x agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec_cli.early_exit.errors import SettingsError

LmHead = Callable[[Tensor], Tensor]
"""The model's own head: [N, hidden] -> [N, V]; may be quantised, scaled or soft-capped."""


class HeadError(SettingsError):
    """An exit head that cannot be used; the message says which and why."""


class ExitHead(nn.Module):
    """What all heads share: an optional draft vocabulary, and logits = projection(transform(x))."""

    kind: ClassVar[str]
    rank: int | None = None
    vocab_ids: Tensor | None

    def __init__(self, vocab_ids: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("vocab_ids", None if vocab_ids is None else check_vocab_ids(vocab_ids))

    def transform(self, x: Tensor) -> Tensor:
        """What the projection reads, [N, hidden] -> [N, hidden]; x itself unless the head is a translator."""
        return x

    def logits(self, x: Tensor, lm_head: LmHead) -> Tensor:
        """Draft logits through any lm_head, [N, hidden] -> [N, V'].

        With a draft vocabulary this computes all V columns and keeps V' of them: right for every lm_head, but no
        cheaper. `bind` is the cheap path where the weight is at hand.
        """
        full = lm_head(self.transform(x))
        return full if self.vocab_ids is None else full.index_select(-1, self.vocab_ids)

    def bind(self, lm_head_weight: Tensor, lm_head_bias: Tensor | None = None) -> BoundHead:
        """The head with its projection rows gathered: lm_head_weight [V or more, hidden] -> a `BoundHead`.

        Rows beyond V (padding) must have been cut off by the caller. The gathered rows are a copy, V' * hidden; with
        no draft vocabulary the model's own tensor is used. Scaling or soft-capping of logits stays with the caller.
        """
        if self.vocab_ids is None:
            return BoundHead(self, lm_head_weight, lm_head_bias)
        check_vocab_ids(self.vocab_ids, lm_head_weight.shape[0])
        bias = None if lm_head_bias is None else lm_head_bias[self.vocab_ids]
        return BoundHead(self, lm_head_weight[self.vocab_ids], bias)

    def to_full_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids (any shape) as ids of the full vocabulary, on the device."""
        return draft_ids if self.vocab_ids is None else self.vocab_ids[draft_ids]

    def bytes_per_step(self, hidden: int, vocab_size: int, itemsize: int = 2) -> int:
        """Bytes of weights that one draft step of this head reads; see `bytes_per_step`."""
        draft_vocab = None if self.vocab_ids is None else len(self.vocab_ids)
        bias = getattr(self, "bias", None) is not None
        return bytes_per_step(self.kind, hidden, draft_vocab or vocab_size, self.rank, bias=bias, itemsize=itemsize)


class Lens(ExitHead):
    """The model's own lm_head on the exit hidden state."""

    kind = "lens"


class LeastSquares(ExitHead):
    """A linear map straight to logits; the model's lm_head is not read.

    weight: [V', hidden]. bias: [V'] or None.
    """

    kind = "lsq"

    def __init__(self, weight: Tensor, bias: Tensor | None = None, vocab_ids: Tensor | None = None) -> None:
        super().__init__(vocab_ids)
        _check_shape("lsq weight", weight, (None if vocab_ids is None else len(vocab_ids), None))
        self.weight = _frozen(weight)
        self.bias = None if bias is None else _frozen(_check_shape("lsq bias", bias, (weight.shape[0],)))

    def logits(self, x: Tensor, lm_head: LmHead | None = None) -> Tensor:
        """Draft logits [N, hidden] -> [N, V']; `lm_head` is not used."""
        return F.linear(x, self.weight, self.bias)

    def bind(self, lm_head_weight: Tensor | None = None, lm_head_bias: Tensor | None = None) -> BoundHead:
        """The head as a `BoundHead` over its own rows; the arguments are not used."""
        return BoundHead(self, self.weight, self.bias)


class Translator(ExitHead):
    """z_hat = x + f(x), then the model's lm_head; the residual form makes f = 0 the lens.

    Full rank: weight [hidden, hidden], f(x) = x @ weight^T + bias. Rank r: down [r, hidden] and up [hidden, r],
    f(x) = (x @ down^T) @ up^T + bias: 2 * hidden * r parameters. bias: [hidden] or None.
    """

    kind = "translator"

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        down: Tensor | None = None,
        up: Tensor | None = None,
        bias: Tensor | None = None,
        vocab_ids: Tensor | None = None,
    ) -> None:
        super().__init__(vocab_ids)
        low_rank = down is not None and up is not None
        if (weight is None) != low_rank or (down is None) != (up is None):
            raise HeadError("a translator has either weight, or both down and up")
        if down is not None and up is not None:
            rank, hidden = _check_shape("translator down", down, (None, None)).shape
            _check_shape("translator up", up, (hidden, rank))
            self.rank = rank
        elif weight is not None:
            hidden = weight.shape[-1]
            _check_shape("translator weight", weight, (hidden, hidden))
        self.weight = None if weight is None else _frozen(weight)
        self.down = None if down is None else _frozen(down)
        self.up = None if up is None else _frozen(up)
        self.bias = None if bias is None else _frozen(_check_shape("translator bias", bias, (hidden,)))

    def transform(self, x: Tensor) -> Tensor:
        """z_hat, [N, hidden] -> [N, hidden]."""
        if self.down is not None and self.up is not None:
            return x + F.linear(F.linear(x, self.down), self.up, self.bias)  # [N, r] in between
        assert self.weight is not None
        return x + F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class BoundHead:
    """A head with its projection at hand: what a draft loop runs. weight: [V', hidden]; bias: [V'] or None.

    No module, on purpose: the weight may be the model's own, and must not be moved or listed as another parameter.
    """

    head: ExitHead
    weight: Tensor
    bias: Tensor | None = None

    def logits(self, x: Tensor, linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear) -> Tensor:
        """Draft logits, [N, hidden] -> [N, V']. linear: multiplies (input, weight, bias) like PyTorch's."""
        return linear(self.head.transform(x), self.weight, self.bias)


def scatter_to_full(draft_logits: Tensor, vocab_ids: Tensor, vocab_size: int) -> Tensor:
    """Draft logits over the full vocabulary, [N, V'] -> [N, V], -inf for tokens outside the draft vocabulary.

    Its softmax is the true draft distribution (zeros outside), which is what rejection sampling needs to stay
    lossless (Leviathan et al., arXiv:2211.17192, theorem 3.5 holds for any draft distribution).
    """
    full = draft_logits.new_full((*draft_logits.shape[:-1], vocab_size), float("-inf"))
    return full.index_copy_(-1, vocab_ids, draft_logits)


def check_vocab_ids(vocab_ids: Tensor, vocab_size: int | None = None) -> Tensor:
    """`vocab_ids` as int64 [V'], checked: one dimension, integers, not empty, strictly ascending, inside [0, V).

    Raises HeadError naming the first offender.
    """
    if vocab_ids.dim() != 1 or vocab_ids.dtype.is_floating_point or vocab_ids.dtype == torch.bool:
        raise HeadError(f"a draft vocabulary is a list of token ids, not {vocab_ids.dtype} {list(vocab_ids.shape)}")
    if len(vocab_ids) == 0:
        raise HeadError("the draft vocabulary is empty; at least one token id is needed")
    if vocab_size is not None and len(vocab_ids) > vocab_size:
        raise HeadError(f"a draft vocabulary of {len(vocab_ids)} is larger than the vocabulary of {vocab_size}")
    ids = vocab_ids.to(torch.int64)
    if (ids[1:] <= ids[:-1]).any():
        raise HeadError("a draft vocabulary must be in ascending order without repeats")
    first, last = int(ids[0]), int(ids[-1])
    if first < 0 or (vocab_size is not None and last >= vocab_size):
        wrong = first if first < 0 else last
        raise HeadError(f"draft vocabulary id {wrong} is out of range; allowed: 0 to {(vocab_size or last + 1) - 1}")
    return ids


def most_frequent_ids(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent tokens, counts [V] -> int64 [size] ascending; ties go to the smaller id.

    Raises HeadError for a size outside 1..V.
    """
    if not 1 <= size <= len(counts):
        raise HeadError(f"draft vocabulary size {size} is out of range; allowed: 1 to {len(counts)}, the vocabulary")
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def with_draft_vocabulary(head: ExitHead, vocab_ids: Tensor) -> ExitHead:
    """The same head over a draft vocabulary; lsq rows are gathered (copied). Raises HeadError if it has one already."""
    if head.vocab_ids is not None:
        raise HeadError(f"the head has a draft vocabulary of {len(head.vocab_ids)} already")
    if isinstance(head, LeastSquares):
        ids = check_vocab_ids(vocab_ids, head.weight.shape[0])
        return LeastSquares(head.weight[ids], None if head.bias is None else head.bias[ids], ids)
    if isinstance(head, Translator):
        return Translator(head.weight, down=head.down, up=head.up, bias=head.bias, vocab_ids=vocab_ids)
    return Lens(vocab_ids)


def bytes_per_step(
    kind: str, hidden: int, vocab_size: int, rank: int | None = None, *, bias: bool = False, itemsize: int = 2
) -> int:
    """Bytes of weights one draft step of a head reads (batch-independent): the cost model's T_head times bandwidth.

    vocab_size: rows of the projection, V' with a draft vocabulary. rank: of a translator, None is full. itemsize: bytes
    a weight (2 for bf16). Raises HeadError for an unknown kind.
    """
    projection = vocab_size * hidden
    if kind == "lens":
        return projection * itemsize
    if kind == "lsq":
        return (projection + (vocab_size if bias else 0)) * itemsize
    if kind == "translator":
        inner = hidden * hidden if rank is None else 2 * hidden * rank
        return (projection + inner + (hidden if bias else 0)) * itemsize
    raise HeadError(f"head kind {kind!r} is not known; allowed: lens, lsq, translator")


def _frozen(tensor: Tensor) -> nn.Parameter:
    # A Parameter so that .to() and training find it; frozen because only training.py turns gradients on.
    return nn.Parameter(tensor.detach(), requires_grad=False)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> Tensor:
    fits = tensor.dim() == len(shape) and all(
        want in (None, got) for want, got in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise HeadError(f"{name} has shape {list(tensor.shape)}; expected [{wanted}]")
    return tensor
