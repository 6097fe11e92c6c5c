"""Hidden states for fitting exit heads, read off the target's own forward passes, the way EAGLE-3 gets them.

vLLM's models can return the hidden states that leave chosen layers (`set_aux_hidden_state_layers`), quantised models
as they will be served. The tap takes them off the model's output, so the model runner sees what it always sees. They
are streamed into normal equations on the model's device and never held, but for the few that validate and test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selfspec_cli.early_exit.equations import FitReport, NormalEquations
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.fitting import choose_ridge, fit_head, fit_scale, scaled, translator_target
from selfspec_cli.early_exit.head_module import ExitHead
from selfspec_cli.early_exit.head_spec import HeadSpec
from selfspec_cli.vllm_plugin.decoder import decoder_of

Mode = Literal["fit", "validate", "test"]
MODES: tuple[Mode, ...] = ("fit", "validate", "test")
PIECE = 256  # states at a time through the lm_head: logits are [256, V]
SCALED_ON = 8  # such pieces for a scale and a prior: two numbers need no more, and each round reads the whole head


class Tap:
    """Takes the hidden states that leave chosen layers off each forward pass of a model, and hands them to `collector`.

    layers: exit layers, E for the states after the first E layers. Raises SettingsError for a model that does not give
    its states out.
    """

    def __init__(self, model: Any, layers: Iterable[int]) -> None:
        if not hasattr(model, "set_aux_hidden_state_layers"):
            raise SettingsError(
                f"architecture {type(model).__name__} cannot be fitted: vLLM does not give out its inner hidden "
                "states (it has no set_aux_hidden_state_layers)"
            )
        self.model, self.layers = model, tuple(sorted(set(layers)))
        self.collector: Collector | None = None
        model.set_aux_hidden_state_layers(self.layers)
        self._forward = model.forward
        model.forward = self.forward
        model.early_exit_tap = self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, minus the auxiliary hidden states."""
        output = self._forward(*args, **kwargs)
        if not isinstance(output, tuple):
            return output
        z, aux = output
        if self.collector is not None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            positions = kwargs["positions"] if "positions" in kwargs else args[1]
            self.collector.take(ids, positions, z, dict(zip(self.layers, aux, strict=True)))
        return z


@dataclass
class Collector:
    """Accumulates what heads need at each layer of `model`'s tap.

    specs: heads to fit, or to test where they need no fit. wanted: pairs of each mode. ridge: relative; None is chosen
    by agreement on the validation split. mode: what the coming forward passes are for. seen: pairs so far, by mode.
    kept: held-out states by mode, for each forward pass the full model's argmax [n], and layer -> x [n, hidden].
    error: why collecting stopped, None while all is well: an exception inside a forward pass would end the engine, and
    in a worker process its message with it.
    """

    model: nn.Module
    layers: Sequence[int]
    specs: Sequence[HeadSpec]
    vocab_size: int
    dtype: torch.dtype
    wanted: Mapping[str, int]
    ridge: float | None = None
    mode: Mode = "fit"
    seen: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MODES, 0))
    kept: dict[str, list[tuple[Tensor, Mapping[int, Tensor]]]] = field(default_factory=dict)
    error: str | None = None

    def __post_init__(self) -> None:
        self._norm: Any = decoder_of(self.model).norm
        self._sums: dict[tuple[int, str, bool], NormalEquations] = {}

    @torch.inference_mode()
    def take(self, ids: Tensor, positions: Tensor, z: Tensor, aux: Mapping[int, Tensor]) -> None:
        """One forward pass. ids, positions: [n]; z: [n, hidden] normed; aux: layer -> [n, hidden], not normed."""
        if self.error is not None:
            return
        room = self.wanted[self.mode] - self.seen[self.mode]
        # A row has a next token if the row after it is the next position of the same prompt.
        rows = (positions[1:] == positions[:-1] + 1).nonzero().flatten()[:room]
        if not len(rows):
            return
        try:
            self._add(rows, ids, z[rows], {layer: self._norm(aux[layer][rows].contiguous()) for layer in self.layers})
        except SettingsError as error:
            self.error = str(error)
            return
        self.seen[self.mode] += len(rows)

    def _add(self, rows: Tensor, ids: Tensor, z: Tensor, x: Mapping[int, Tensor]) -> None:
        """ids: of the whole pass; z, x: of `rows`."""
        if self.mode != "fit":
            self.kept.setdefault(self.mode, []).append((self._argmax(z), x))
            return
        tokens = {"next_token": ids[rows + 1].long()}
        if any(spec.target == "argmax" for spec in self.specs):
            tokens["argmax"] = self._argmax(z)
        for target, bias in {(spec.target, spec.bias) for spec in self.specs if spec.target is not None}:
            for layer in self.layers:
                y = tokens[target] if target in tokens else translator_target(x[layer], z)
                outputs = y.shape[1] if y.is_floating_point() else self.vocab_size
                key = (layer, target, bias)
                if key not in self._sums:
                    self._sums[key] = NormalEquations(x[layer].shape[1], outputs, bias=bias, device=z.device)
                self._sums[key].update(x[layer], y)

    def _argmax(self, z: Tensor) -> Tensor:
        # In pieces: logits are [n, vocabulary], and n is a whole prefill.
        return torch.cat([self.lm_head(part).argmax(-1) for part in z.split(PIECE)])

    def lm_head(self, z: Tensor) -> Tensor:
        """The model's own logits, [n, hidden] of any dtype -> [n, V]."""
        return self.model.compute_logits(z.to(self.dtype))[:, : self.vocab_size]  # type: ignore[operator]

    def solve(self, layer: int, spec: HeadSpec) -> tuple[ExitHead, FitReport | None]:
        """One planned head at one layer, over the full vocabulary, in fp32; a head that needs no fit has no report."""
        if spec.target is None:
            return ExitHead(spec.kind), None
        solver = partial(fit_head, spec, self._sums[layer, spec.target, spec.bias])
        if self.ridge is not None:
            return solver(self.ridge)
        return choose_ridge(solver, self._validation(layer), self.lm_head)

    def scaled(self, layer: int, spec: HeadSpec, head: ExitHead) -> tuple[ExitHead, dict[str, float]]:
        """A solved head with outputs that are a distribution, and how that was fitted (`HeadScale.to_dict`).

        A head that uses the model's lm_head has one already, and one that no scale mends stays as it is: {}.
        """
        held_out = self._validation(layer)[:SCALED_ON]
        if not head.has_rows or not held_out:
            return head, {}
        counts = self._sums[layer, str(spec.target), spec.bias].target_counts
        found = fit_scale(head, counts, held_out)
        return (head, {}) if found is None else (scaled(head, counts, found), found.to_dict())

    def _validation(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """(x [n, hidden], the full model's argmax [n]) of the validation split, PIECE states at most each."""
        return [
            pair
            for best, x in self.kept.get("validate", [])
            for pair in zip(x[layer].split(PIECE), best.split(PIECE), strict=True)
        ]
