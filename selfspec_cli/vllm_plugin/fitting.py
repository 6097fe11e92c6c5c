"""Exit heads and copies of weights fitted in a worker, to what the loaded model computes.

Heads: vLLM's models can return the hidden states that leave chosen layers, as EAGLE-3 gets them, quantised models as
they will be served. The tap takes them off the model's output. They are streamed into normal equations on the model's
device and never held, but for the few that validate and test; then heads are solved, tested as served, and saved.

Copies: second moments of what linear layers see, by hooks on the layers of an eager engine, in float32 on the device of
the weights: [in, in] for each distinct input, so for an 8B model about 30 GB; `layers` takes some at a time."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selfspec_cli.early_exit.artifact import save_head
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.equations import FitReport, NormalEquations
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.fitted_weights import LM_HEAD, About, FittedWeights, weighted_error
from selfspec_cli.early_exit.fitting import choose_ridge, fit_head, fit_scale, scaled, translator_target
from selfspec_cli.early_exit.head_metadata import HeadMetadata, head_filename
from selfspec_cli.early_exit.head_module import ExitHead, with_draft_vocabulary
from selfspec_cli.early_exit.heads import HeadSpec
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.decoder import decoder_of, has_experts, layers_of
from selfspec_cli.vllm_plugin.exit_head import TargetHead, embedding, fingerprint, plain_lm_head
from selfspec_cli.vllm_plugin.weights.copied import plain_weight

Mode = Literal["fit", "validate", "test"]
MODES: tuple[Mode, ...] = ("fit", "validate", "test")
PIECE = 256  # states at a time through the lm_head: logits are [256, V]
SCALED_ON = 8  # such pieces for a scale and a prior: two numbers need no more, and each round reads the whole head


class Tap:
    """Takes the hidden states that leave chosen layers off each forward pass of a model, and hands them to `collector`.
    layers: E for the states after the first E. Raises SettingsError for a model that does not give its states out."""

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
    kept: held-out states by mode, for each forward pass the full model's argmax [n], and layer -> x [n, hidden]. error:
    why collecting stopped: an exception inside a forward pass would end the engine, and its message with it."""

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
        A head that uses the model's lm_head has one already, and one that no scale mends stays as it is: {}."""
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


def save_all(
    model: nn.Module,
    vllm_config: vllm.VllmConfig,
    folder: str,
    about: dict[str, Any],
    vocabularies: Mapping[str, list[int]],
) -> list[dict[str, Any]]:
    """Fit, test and save every head that `model`'s collector was asked for; one plain report a head and vocabulary.
    The arguments are those of `EarlyExitWorker.early_exit_fit`. On tensor-parallel ranks the first one writes."""
    tap: Any = model.early_exit_tap
    collector: Collector = tap.collector
    mark, hidden = fingerprint(model, vllm_config), int(vllm_config.model_config.get_hidden_size())
    device = embedding(model).device
    over: dict[str | None, Tensor | None] = {None: None}
    over |= {tag: torch.tensor(ids, device=device) for tag, ids in vocabularies.items()}
    reports = []
    for layer, spec in itertools.product(collector.layers, collector.specs):
        solved, report = collector.solve(layer, spec)
        full, scale = collector.scaled(layer, spec, solved)
        for tag, ids in over.items():
            head = full if ids is None else with_draft_vocabulary(full, ids)
            tested = _tested(head, collector, layer, model, vllm_config)
            summary = {"layer": layer, "head": spec.name, "kind": spec.kind, "vocab": tag or "full", **tested}
            if report is not None or tag is not None:
                fit = {} if report is None else report.to_dict()
                fit |= {"agreement": tested["agreement"], "tested_on": tested["tested_on"], **scale}
                path = Path(folder) / head_filename(spec, layer, tag)
                metadata = HeadMetadata(
                    kind=spec.kind,
                    layer=layer,
                    hidden=hidden,
                    vocab_size=collector.vocab_size,
                    rank=spec.rank,
                    bias=spec.bias,
                    draft_vocab=tag,
                    target=spec.target,
                    pairs=None if report is None else report.pairs,
                    ridge=None if report is None else report.ridge,
                    fit=fit,
                    fingerprint=mark,
                    **about,
                )
                if vllm_config.parallel_config.rank == 0:
                    save_head(path, head, metadata)
                summary |= fit | {"target": spec.target, "path": str(path)}
            reports.append(summary)
    tap.collector = None
    return reports


def _tested(
    head: ExitHead, collector: Collector, layer: int, model: nn.Module, vllm_config: vllm.VllmConfig
) -> dict[str, Any]:
    """How often the head, in the dtype and by the path that serve it, drafts the model's tokens on held-out text."""
    served = copy.deepcopy(head).to(embedding(model).device, collector.dtype)
    bound = TargetHead(served, model, collector.vocab_size, vllm_config)

    def draft(x: Tensor) -> Tensor:
        return bound.to_full_ids(bound.logits(x)[:, : bound.draft_vocab_size].argmax(-1))

    @torch.inference_mode()
    def agreed(best: Tensor, x: Tensor) -> list[bool]:
        return (torch.cat([draft(part) for part in x.split(PIECE)]) == best).tolist()

    test = [bit for best, x in collector.kept["test"] for bit in agreed(best, x[layer])]
    hidden = int(vllm_config.model_config.get_hidden_size())
    return {
        "agreement": sum(test) / len(test),
        "tested_on": len(test),
        "bytes_per_step": head.bytes_per_step(hidden, collector.vocab_size, collector.dtype.itemsize),
        "parameters": sum(weight.numel() for weight in head.parameters()),
    }


# ---- copies of weights -----------------------------------------------------------------------------------------------


class Moments:
    """Sums of x^T x, over `tokens` tokens, of every linear layer in the decoder's layers, and of what enters the
    lm_head. Raises SettingsError for a mixture of experts, on tensor-parallel ranks and on a compiled engine."""

    def __init__(self, model: nn.Module, layers: Sequence[int], vllm_config: vllm.VllmConfig) -> None:
        decoder_layers = layers_of(model)
        if any(map(has_experts, decoder_layers)):
            raise SettingsError("mixture-of-experts layers have no copies, so none can be fitted")
        if not vllm_config.model_config.enforce_eager:
            raise SettingsError("activations are collected on an eager engine only; allowed: enforce_eager = True")
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            raise SettingsError(
                "copies are fitted on one device: each rank would see a share of the weights; allowed: "
                "tensor_parallel_size = 1"
            )
        self.model, self.vllm_config, self.tokens = model, vllm_config, 0
        self.modules: dict[str, Any] = {
            f"layers.{i}.{name}": part
            for i in layers
            for name, part in decoder_layers[i].named_modules()
            if isinstance(part, vllm.LinearBase)
        }
        self.sums: dict[str, Tensor] = {}
        self._handles = [
            part.register_forward_pre_hook(self._hook(name), with_kwargs=True) for name, part in self.modules.items()
        ]
        self._forward = model.forward
        model.forward = self._outermost

    def _hook(self, name: str) -> Any:
        def before(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._add(name, arguments[0] if arguments else next(iter(named.values())))

        return before

    def _outermost(self, *args: Any, **kwargs: Any) -> Any:
        result = self._forward(*args, **kwargs)
        x = result[0] if isinstance(result, tuple) else result
        self._add(LM_HEAD, x)
        self.tokens += x.reshape(-1, x.shape[-1]).shape[0]
        return result

    @torch.inference_mode()
    def _add(self, name: str, x: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1]).float()
        if name not in self.sums:
            self.sums[name] = torch.zeros(x.shape[1], x.shape[1], device=x.device)
        self.sums[name].addmm_(x.T, x)

    def end(self) -> None:
        """Take the hooks off; the sums stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.model.forward = self._forward

    @torch.inference_mode()
    def fitted(self, kind: str, about: dict[str, Any]) -> tuple[FittedWeights, dict[str, dict[str, float]]]:
        """Copies of every layer by the data seen, and by layer the share of the product's mean square that is lost: by
        rounding to nearest, and by rounding with the data. Raises SettingsError for a layer without a plain weight."""
        if not self.tokens:
            raise SettingsError("no activations were collected, so there is nothing to fit copies to")
        found = FittedWeights(About(kind, fingerprint(self.model, self.vllm_config), self.tokens, more=about), {})
        report: dict[str, dict[str, float]] = {}
        for name, module in self.modules.items():
            weight = plain_weight(module)
            if weight is None:
                raise DRAFT_WEIGHTS[kind].impossible(f"{name} ({type(module).__name__}) has no plain weight to copy")
            self._fit(found, report, name, weight)
        lm_head = plain_lm_head(self.model)
        if lm_head is not None:
            rows = int(self.vllm_config.model_config.get_vocab_size())
            self._fit(found, report, LM_HEAD, lm_head[:rows])
        return found, report

    def _fit(self, found: FittedWeights, report: dict[str, Any], name: str, weight: Tensor) -> None:
        kind, moment = DRAFT_WEIGHTS[found.about.kind], self.sums[name] / self.tokens
        copy = kind.fit(weight, moment)
        weight = weight.float()
        error = weight - kind.dequantise(copy, torch.float32)
        nearest = weight - kind.dequantise(kind.quantise(weight), torch.float32)
        whole = max(weighted_error(weight, moment), 1e-30)
        found.copies[name] = {key: tensor.cpu() for key, tensor in copy.items()}
        report[name] = {
            "nearest": weighted_error(nearest, moment) / whole,
            "fitted": weighted_error(error, moment) / whole,
        }
