"""Hidden states for fitting exit heads, read off the target's own forward passes, the way EAGLE-3 gets them.

vLLM's models can return the hidden states that leave chosen layers (`set_aux_hidden_state_layers`), quantised models
as they will be served. The tap takes them off the model's output, so the model runner sees what it always sees. They
are streamed into normal equations on the model's device and never held, but for the few that validate and test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selfspec_cli.early_exit.evaluation import agreement, choose_ridge
from selfspec_cli.early_exit.fitting import FitReport, NormalEquations, fit_lsq, fit_translator, translator_target
from selfspec_cli.early_exit.heads import ExitHead, Lens
from selfspec_cli.early_exit.settings import SettingsError
from selfspec_cli.vllm_plugin.trunk import decoder_of

Mode = Literal["fit", "validate", "test"]


@dataclass(frozen=True)
class HeadPlan:
    """One head to fit. kind: lsq or translator. target: of an lsq, next_token or argmax. rank: of a translator."""

    kind: str
    target: str = "next_token"
    rank: int | None = None
    bias: bool = False
    ridge: float | None = None  # None: chosen by agreement on the validation split

    @property
    def sums(self) -> tuple[str, str, bool]:
        """Heads with equal `sums` are solved from the same normal equations."""
        return self.kind, self.target if self.kind == "lsq" else "final_hidden", self.bias


@dataclass
class FittedHead:
    """A head and how it went. agreement: share of held-out positions where its argmax is the full model's."""

    layer: int
    plan: HeadPlan | None  # None is the lens, which is not fitted
    head: ExitHead
    report: FitReport | None
    agreement: float


@dataclass
class Tap:
    """Receives (token ids, positions, final hidden states, exit hidden states) of each forward pass."""

    model: Any
    layers: tuple[int, ...]
    collector: Collector | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, minus the auxiliary hidden states."""
        output = self._forward(*args, **kwargs)
        if not isinstance(output, tuple):
            return output
        z, aux = output
        if self.collector is not None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            positions = kwargs["positions"] if "positions" in kwargs else args[1]
            self.collector.add(ids, positions, z, dict(zip(self.layers, aux, strict=True)))
        return z

    def attach(self) -> None:
        """Make the model return the states and take them off again. Raises SettingsError if it cannot."""
        if not hasattr(self.model, "set_aux_hidden_state_layers"):
            raise SettingsError(
                f"architecture {type(self.model).__name__} cannot be fitted: vLLM does not give out its inner hidden "
                "states (it has no set_aux_hidden_state_layers)"
            )
        self.model.set_aux_hidden_state_layers(self.layers)
        self._forward = self.model.forward
        self.model.forward = self.forward
        self.model.early_exit_tap = self


def tap(model: nn.Module, layers: Sequence[int]) -> None:
    """Attach a tap for the states that leave the first E layers, for each E in `layers`."""
    Tap(model, tuple(sorted(set(layers)))).attach()


@dataclass
class Collector:
    """Accumulates what is needed to fit `plans` at each layer of `model`'s tap."""

    model: nn.Module
    layers: Sequence[int]
    plans: Sequence[HeadPlan]
    vocab_size: int
    wanted: Mapping[Mode, int]  # pairs
    mode: Mode = "fit"
    seen: dict[Mode, int] = field(default_factory=lambda: {"fit": 0, "validate": 0, "test": 0})

    def __post_init__(self) -> None:
        self._norm: Any = decoder_of(self.model).norm
        self._sums: dict[tuple[int, tuple[str, str, bool]], NormalEquations] = {}
        self._kept: dict[tuple[Mode, int], list[tuple[Tensor, Tensor]]] = {}

    @torch.inference_mode()
    def add(self, ids: Tensor, positions: Tensor, z: Tensor, aux: Mapping[int, Tensor]) -> None:
        """One forward pass. ids, positions: [n]; z: [n, hidden] normed; aux: layer -> [n, hidden], not normed."""
        room = self.wanted[self.mode] - self.seen[self.mode]
        # A row has a next token if the row after it is the next position of the same prompt.
        rows = (positions[1:] == positions[:-1] + 1).nonzero().flatten()[:room]
        if not len(rows):
            return
        following = ids[rows + 1].long()
        z = z[rows]
        best = self._argmax(z) if self._needs_argmax() else None
        for layer in self.layers:
            x = self._norm(aux[layer][rows].contiguous())
            if self.mode == "fit":
                self._update(layer, x, z, following, best)
            else:
                assert best is not None
                self._kept.setdefault((self.mode, layer), []).append((x, best))
        self.seen[self.mode] += len(rows)

    def _needs_argmax(self) -> bool:
        return self.mode != "fit" or any(plan.sums[1] == "argmax" for plan in self.plans)

    def _argmax(self, z: Tensor) -> Tensor:
        # In pieces: logits are [n, vocabulary], and n is a whole prefill.
        return torch.cat([self._lm_head(part).argmax(-1) for part in z.split(256)])

    def _lm_head(self, z: Tensor) -> Tensor:
        return self.model.compute_logits(z)[:, : self.vocab_size]  # type: ignore[operator]

    def _update(self, layer: int, x: Tensor, z: Tensor, following: Tensor, best: Tensor | None) -> None:
        for sums in {plan.sums for plan in self.plans}:
            kind, target, bias = sums
            if (layer, sums) not in self._sums:
                outputs = self.vocab_size if kind == "lsq" else x.shape[1]
                self._sums[layer, sums] = NormalEquations(x.shape[1], outputs, bias=bias, device=x.device)
            y = {"next_token": following, "argmax": best}.get(target)
            self._sums[layer, sums].update(x, translator_target(x, z) if y is None else y)

    def solve(self, layer: int) -> list[FittedHead]:
        """The lens and every planned head at one layer, evaluated on the held-out text."""
        lens = Lens()
        fitted = [FittedHead(layer, None, lens, None, self._tested([lens], layer)[0])]
        for plan in self.plans:
            solver = partial(_solve, self._sums[layer, plan.sums], plan)
            if plan.ridge is None:
                choice = choose_ridge(solver, self._kept["validate", layer], self._lm_head)
                head, report = choice.head, choice.report
            else:
                head, report = solver(plan.ridge)
            fitted.append(FittedHead(layer, plan, head, report, self._tested([head], layer)[0]))
        return fitted

    def _tested(self, heads: Sequence[ExitHead], layer: int) -> list[float]:
        return agreement(heads, self._kept["test", layer], self._lm_head)


def _solve(equations: NormalEquations, plan: HeadPlan, ridge: float) -> tuple[ExitHead, FitReport]:
    if plan.kind == "lsq":
        return fit_lsq(equations, ridge)
    return fit_translator(equations, ridge, plan.rank)
