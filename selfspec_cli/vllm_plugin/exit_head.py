"""Binds an exit head to a loaded target: its lm_head as it is (quantised, scaled, soft-capped), or rows of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from selfspec_cli.early_exit import fitted_weights
from selfspec_cli.early_exit.artifact import load_head, model_fingerprint
from selfspec_cli.early_exit.draft_vocab import ids_of
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS, DraftWeights
from selfspec_cli.early_exit.fitted_weights import LM_HEAD, FittedWeights
from selfspec_cli.early_exit.head_module import ExitHead, scatter_to_full, with_draft_vocabulary
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.decoder import input_embedding, language_model, output_projection
from selfspec_cli.vllm_plugin.refusals import refuse_fitted_copies
from selfspec_cli.vllm_plugin.weights.copied import CopiedWeight
from selfspec_cli.vllm_plugin.weights.copied import copied as on_copy
from selfspec_cli.vllm_plugin.weights.shared import linear

SAME_LOGITS = 0.02
"""Relative difference that rounding to 16 bits may make."""


@dataclass(frozen=True)
class Projection:
    """The last product of a draft step.
    logits: x [n, hidden] -> [n, V'], the bias included. tensors: what that reads on this rank, apart from the bias
    [V']. copied: the copy of weights that makes the logits, and the bias that its product adds."""

    logits: Callable[[Tensor], Tensor]
    tensors: list[Tensor]
    bias: Tensor | None
    copied: tuple[CopiedWeight, Tensor | None] | None = None


def sharded(rows: Any, count: int, bias: Tensor | None, vllm_config: vllm.VllmConfig) -> Projection:
    """By this rank's share of `count` rows and that of the others; every rank calls it together, and has all logits.
    rows: vLLM's ParallelLMHead (or one on copies). bias: [count] or None, kept whole."""
    with vllm.set_current_vllm_config(vllm_config):
        gather = vllm.LogitsProcessor(count)

    def logits(x: Tensor) -> Tensor:
        gathered_logits: Tensor = gather(rows, x)
        return gathered_logits if bias is None else gathered_logits + bias

    copy = getattr(rows, "copy_of_weight", None)
    if copy is None:
        return Projection(logits, [parameter.detach() for parameter in rows.parameters()], bias)
    return Projection(logits, list(copy.parameters()), bias, (copy, None))


def split(weight: Tensor, vllm_config: vllm.VllmConfig) -> vllm.ParallelLMHead:
    """This rank's share of `weight` [rows, hidden], which is the same on every rank."""
    rows, hidden = weight.shape
    with vllm.set_current_vllm_config(vllm_config), torch.device(weight.device):
        share = vllm.ParallelLMHead(rows, hidden, params_dtype=weight.dtype)
    share.weight_loader(share.weight, weight)
    share.quant_method.process_weights_after_loading(share)
    return share


def gathered(shard: Tensor, rows: int) -> Tensor:
    """All rows of a weight that is split over ranks by rows, [rows, hidden], on every rank.
    shard: this rank's rows, padded to the same number on every rank; padding is at the end of the whole."""
    return vllm.tensor_model_parallel_all_gather(shard.contiguous(), dim=0)[:rows]


class TargetHead:
    """An exit head as the draft loop uses it: normed hidden states in, draft logits out."""

    def __init__(
        self,
        head: ExitHead,
        target: nn.Module,
        vocab_size: int,
        vllm_config: vllm.VllmConfig,
        draft_weights: str = "shared",
        fitted: FittedWeights | None = None,
    ) -> None:
        self.head = head
        self.vocab_size = vocab_size
        self._compute_logits: Any = target.compute_logits
        self._bind = functools.partial(self._bound_to, target, vllm_config, DRAFT_WEIGHTS[draft_weights], fitted)
        self._bound = self._bind()

    def renew(self) -> None:
        """Fill what was made of the target's lm_head from the weights that it has now, in place."""
        if self._bound is None or self.head.has_rows:
            return
        new = self._bind()
        assert new is not None
        for old, tensor in zip(self._bound.tensors, new.tensors, strict=True):
            if old.data_ptr() != tensor.data_ptr():
                old.copy_(tensor)

    def _bound_to(
        self, target: nn.Module, vllm_config: vllm.VllmConfig, weights: DraftWeights, fitted: FittedWeights | None
    ) -> Projection | None:
        """What a draft step multiplies by for its logits; None for all that the target does to make its own."""
        head, vocab_size = self.head, self.vocab_size
        copies = weights.copies and not head.has_rows  # a head's own rows are no copy of the target's
        if head.vocab_ids is None and not head.has_rows and not copies:
            return None
        # Gathered rows are what makes a draft vocabulary cheap; without plain rows it is only right, not cheap.
        shards = vllm_config.parallel_config.tensor_parallel_size
        lm_head = None if head.has_rows else plain_lm_head(target, shards)
        if lm_head is None and not head.has_rows:
            logging.getLogger("vllm.selfspec").warning(
                "logits of %s are not its lm_head's alone (a norm, a scale, a cap or a bias), so drafts read all of "
                "it: a draft vocabulary or copies of weights save nothing there",
                type(language_model(target)).__name__,
            )
            return None
        if shards > 1:
            return self._over_ranks(target, lm_head, weights if copies else None, vllm_config)
        weight, bias = head.bind(None if lm_head is None else lm_head[:vocab_size])
        if not copies:
            return Projection(lambda x: linear(x, weight, bias), [weight], bias)
        if fitted is not None and LM_HEAD in fitted.copies:
            rows = torch.arange(vocab_size) if head.vocab_ids is None else head.vocab_ids.cpu()
            weights = fitted.kind_of(LM_HEAD, rows)
        copy = CopiedWeight(weights, weight)
        return Projection(lambda x: copy(x, bias), list(copy.parameters()), bias, (copy, bias))

    def _over_ranks(
        self, target: nn.Module, shard: Tensor | None, copies: DraftWeights | None, vllm_config: vllm.VllmConfig
    ) -> Projection:
        """The projection over tensor-parallel ranks, each with its share of the rows, or with copies of them.
        shard: this rank's share of the lm_head; None for a head with rows of its own."""
        head, bias = self.head, None
        if shard is not None and head.vocab_ids is None:
            rows = language_model(target).lm_head  # split already
        else:
            weight, bias = head.bind(None if shard is None else gathered(shard, self.vocab_size))
            rows = split(weight, vllm_config)
            head.drop_rows()  # each rank keeps its share of them
        if copies is not None:
            rows = on_copy(copies, vllm_config.model_config.dtype, rows, "lm_head")
        return sharded(rows, self.draft_vocab_size, bias, vllm_config)

    @property
    def copied(self) -> tuple[CopiedWeight, Tensor | None] | None:
        """The copy that makes the logits, on this tensor-parallel rank, and the bias that its product adds; or None."""
        return None if self._bound is None else self._bound.copied

    @property
    def tensors(self) -> list[Tensor]:
        """Every weight that a draft step reads for its logits, but for the model's own lm_head as it is."""
        bound = [] if self._bound is None else self._bound.tensors
        bias = [] if self._bound is None or self._bound.bias is None else [self._bound.bias]
        return [*self.head.parameters(), *self.head.buffers(), *bound, *bias]

    @property
    def reads_lm_head(self) -> bool:
        """Whether a draft step also reads the target's whole lm_head."""
        return self._bound is None

    @property
    def vocab_ids(self) -> Tensor | None:
        """Draft id -> token id, int64 [V']; None for the full vocabulary."""
        return self.head.vocab_ids

    @property
    def draft_vocab_size(self) -> int:
        """V', the columns of the draft logits."""
        return self.vocab_size if self.vocab_ids is None else len(self.vocab_ids)

    def logits(self, x: Tensor) -> Tensor:
        """[n, hidden] -> draft logits [n, V']."""
        if self._bound is not None:
            return self._bound.logits(self.head.transform(x))
        return self.head.logits(x, self._compute_logits)

    def to_full_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids [n] -> token ids [n]."""
        return self.head.to_full_ids(draft_ids)

    def to_full_logits(self, logits: Tensor) -> Tensor:
        """Draft logits [n, V'] -> [n, V], -inf outside the draft vocabulary."""
        ids = self.head.vocab_ids
        return logits if ids is None else scatter_to_full(logits, ids, self.vocab_size)


def load_exit_head(
    settings: ResolvedSettings, target: nn.Module, vllm_config: vllm.VllmConfig, fitted: FittedWeights | None = None
) -> TargetHead:
    """The head that `settings` names, checked against this model and exit layer; every tensor-parallel rank calls it.
    fitted: copies that were made from data, to take for the lm_head's. Raises HeadError for a head of another model,
    layer or shape, a file that cannot be read, or a draft vocabulary that the model or the head cannot have."""
    config = vllm_config.model_config
    vocab_size = int(config.get_vocab_size())
    head = ExitHead("lens")
    if settings.head.path is not None:
        head, _ = load_head(
            settings.head.path,
            layer=settings.layer,
            hidden=int(config.get_hidden_size()),
            vocab_size=vocab_size,
            fingerprint=fingerprint(target, vllm_config),
        )
    if (ids := ids_of(settings.vocab, vocab_size)) is not None:
        head = with_draft_vocabulary(head, ids)
    head = head.to(embedding(target).device, config.dtype)
    return TargetHead(head, target, vocab_size, vllm_config, settings.draft_weights, fitted)


def fitted_for(settings: ResolvedSettings, target: nn.Module, vllm_config: vllm.VllmConfig) -> FittedWeights | None:
    """The copies, made from data (`selfspec fit-weights`), that `settings` name, for this model; None: rounded at load.
    Raises SettingsError for a file of another model or another kind of copies, and on several ranks."""
    if settings.draft_weights_path is None:
        return None
    refuse_fitted_copies(settings.draft_weights_path, vllm_config.parallel_config.tensor_parallel_size)
    path, kind = settings.draft_weights_path, settings.draft_weights
    return fitted_weights.load(path, kind, fingerprint(target, vllm_config))


def embedding(target: nn.Module) -> Tensor:
    """The input embedding's weight, [vocabulary (padded), hidden]."""
    weight = input_embedding(target).weight
    assert isinstance(weight, Tensor)
    return weight


def fingerprint(target: nn.Module, vllm_config: vllm.VllmConfig) -> str:
    """Names the loaded model: its shape, and a sample of its embedding (which no quantisation of vLLM's touches)."""
    config = vllm_config.model_config
    shape = config.hf_text_config.to_dict()
    rows, vocab_size = embedding(target), int(config.get_vocab_size())
    if vllm_config.parallel_config.tensor_parallel_size > 1:  # the name must not depend on the number of ranks
        rows = gathered(rows, vocab_size)
    return model_fingerprint(shape, rows[:vocab_size])


def plain_lm_head(target: nn.Module, shards: int = 1) -> Tensor | None:
    """The lm_head's weight [V, hidden] where logits are exactly x @ weight^T; None where they are anything else.
    shards: tensor-parallel ranks, each of which must call it and gets its share of the weight."""
    lm_head, processor = output_projection(target), getattr(language_model(target), "logits_processor", None)
    weight = getattr(lm_head, "weight", None)
    plain = (
        isinstance(weight, Tensor)
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and getattr(lm_head, "bias", None) is None
        and getattr(processor, "soft_cap", None) is None
        and getattr(processor, "scale", 1.0) == 1.0
        and getattr(lm_head, "tp_size", 1) == shards
    )
    if not plain or not isinstance(weight, Tensor):
        return None
    return weight.detach() if _makes_all_of_the_logits(target, weight.detach(), shards) else None


@torch.inference_mode()
def _makes_all_of_the_logits(target: Any, weight: Tensor, shards: int) -> bool:
    """Whether `compute_logits` does nothing but multiply by `weight`, tried on a few states: some architectures have
    their last norm in it (MiMo, Step-3.5), or a scale that no attribute tells of."""
    generator = torch.Generator().manual_seed(0)
    states = 3 * torch.randn(4, weight.shape[1], generator=generator)
    states = states.to(weight.device, weight.dtype)
    logits = target.compute_logits(states)
    if logits is None:
        return False
    rows = gathered(weight, logits.shape[1]) if shards > 1 else weight[: logits.shape[1]]
    plain, logits = F.linear(states, rows).float(), logits.float()
    return bool((plain - logits).norm() <= SAME_LOGITS * logits.norm())
