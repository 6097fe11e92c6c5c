"""An exit head that runs: its kind, its tensors and an optional draft vocabulary as a module of PyTorch.

A draft vocabulary is `vocab_ids`, int64 [V'] ascending: draft id i is token vocab_ids[i].
Heads hold fp32 weights as fitted; call `head.to(device, dtype)` before use, so that weights and x agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec_cli.early_exit.errors import HeadError
from selfspec_cli.early_exit.head_metadata import check_shapes
from selfspec_cli.early_exit.heads import HEADS
from selfspec_cli.early_exit.heads.base import HeadKind

LmHead = Callable[[Tensor], Tensor]
"""The model's own head: [N, hidden] -> [N, V]; may be quantised, scaled or soft-capped."""


class ExitHead(nn.Module):
    """logits = projection(transform(x)), over an optional draft vocabulary.
    kind: a name of HEADS. tensors: its tensors by name (None: there is none), as `HeadKind.shapes` says. Raises
    HeadError for tensors that are not those of a head of this kind, SettingsError for an unknown kind."""

    vocab_ids: Tensor | None

    def __init__(
        self, kind: str, tensors: Mapping[str, Tensor | None] | None = None, vocab_ids: Tensor | None = None
    ) -> None:
        super().__init__()
        self.kind: HeadKind = HEADS[kind]
        self.register_buffer("vocab_ids", None if vocab_ids is None else check_vocab_ids(vocab_ids))
        given = {name: tensor for name, tensor in (tensors or {}).items() if tensor is not None}
        shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
        check_shapes(self.kind, shapes, {} if vocab_ids is None else {"rows": len(vocab_ids)})
        for name, tensor in given.items():
            # A Parameter, so that .to() finds it; frozen, because nothing trains it.
            self.register_parameter(name, nn.Parameter(tensor.detach(), requires_grad=False))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, the draft vocabulary not among them."""
        return {name: tensor for name, tensor in self._parameters.items() if tensor is not None}

    @property
    def has_rows(self) -> bool:
        """Whether its own rows take the place of the model's lm_head."""
        return bool(self.kind.rows)

    def transform(self, x: Tensor) -> Tensor:
        """The input of the projection, [N, hidden] -> [N, hidden]."""
        return self.kind.transform(x, self.tensors)

    def logits(self, x: Tensor, lm_head: LmHead | None = None) -> Tensor:
        """Draft logits through any lm_head, [N, hidden] -> [N, V']; a head with rows of its own needs none. A draft
        vocabulary still computes all V columns: `bind` is cheaper where the lm_head's weight is known."""
        if self.has_rows:
            return F.linear(self.transform(x), *self.bind())
        assert lm_head is not None
        full = lm_head(self.transform(x))
        return full if self.vocab_ids is None else full.index_select(-1, self.vocab_ids)

    def bind(self, lm_head_weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The projection's weight [V', hidden], gathered for a draft vocabulary, else the model's own; and bias [V'].
        lm_head_weight: [V, hidden], without padding; a head with rows of its own does not use it. Scaling or
        soft-capping of logits stays with the caller."""
        if self.has_rows:
            weight, *bias = (self.tensors.get(name) for name in self.kind.rows)
            assert weight is not None
            return weight, bias[0] if bias else None
        assert lm_head_weight is not None
        if self.vocab_ids is None:
            return lm_head_weight, None
        check_vocab_ids(self.vocab_ids, lm_head_weight.shape[0])
        return lm_head_weight[self.vocab_ids], None

    def drop_rows(self) -> None:
        """Give up rows that somebody else keeps; `transform` and the ids are left."""
        for name in self.kind.rows:
            self.register_parameter(name, None)

    def to_full_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids (any shape) as ids of the full vocabulary, on the device."""
        return draft_ids if self.vocab_ids is None else self.vocab_ids[draft_ids]

    def bytes_per_step(self, hidden: int, vocab_size: int, itemsize: int = 2) -> int:
        """Bytes of weights that one draft step reads, whatever the batch size. itemsize: bytes a weight."""
        own = sum(tensor.numel() for tensor in self.tensors.values())
        rows = vocab_size if self.vocab_ids is None else len(self.vocab_ids)
        return (own + (0 if self.has_rows else rows * hidden)) * itemsize


def scatter_to_full(draft_logits: Tensor, vocab_ids: Tensor, vocab_size: int) -> Tensor:
    """Draft logits over the full vocabulary, [N, V'] -> [N, V], -inf for tokens outside the draft vocabulary.
    Their softmax is the true draft distribution, which rejection sampling needs to stay lossless (Leviathan et al.,
    arXiv:2211.17192, theorem 3.5 holds for any draft distribution)."""
    full = draft_logits.new_full((*draft_logits.shape[:-1], vocab_size), float("-inf"))
    return full.index_copy_(-1, vocab_ids, draft_logits)


def check_vocab_ids(vocab_ids: Tensor, vocab_size: int | None = None) -> Tensor:
    """`vocab_ids` as int64 [V']. Raises HeadError unless they are integers, strictly ascending, in [0, V)."""
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
    Raises HeadError for a size outside 1..V."""
    if not 1 <= size <= len(counts):
        raise HeadError(f"draft vocabulary size {size} is out of range; allowed: 1 to {len(counts)}, the vocabulary")
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def with_draft_vocabulary(head: ExitHead, vocab_ids: Tensor) -> ExitHead:
    """The same head over a draft vocabulary, rows of its own gathered (copied). Raises HeadError if it has one."""
    if head.vocab_ids is not None:
        raise HeadError(f"the head has a draft vocabulary of {len(head.vocab_ids)} already")
    rows = head.tensors[head.kind.rows[0]].shape[0] if head.has_rows else None
    ids = check_vocab_ids(vocab_ids, rows)
    tensors = {name: tensor[ids] if name in head.kind.rows else tensor for name, tensor in head.tensors.items()}
    return ExitHead(head.kind.name, tensors, ids)
