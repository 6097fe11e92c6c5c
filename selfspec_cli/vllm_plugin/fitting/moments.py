"""Second moments of what a model's linear layers see, and the copies that are made with them.

The tap hooks the layers of an eager engine. Moments are held in float32 on the device of the weights: [in, in] for
each distinct input, so for an 8B model with its feed-forward blocks about 30 GB; `layers` takes some at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.fitted_weights import LM_HEAD, About, FittedWeights, weighted_error
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.decoder import has_experts, layers_of
from selfspec_cli.vllm_plugin.exit_head import fingerprint, plain_lm_head
from selfspec_cli.vllm_plugin.weights.copied import plain_weight


class Moments:
    """Sums of x^T x of every linear layer in the decoder's layers, and of what enters the lm_head.

    tokens: how many each sum is of. Raises SettingsError for a mixture of experts, on tensor-parallel ranks and on a
    compiled engine.
    """

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
        """Copies of every layer by the data seen, and what is left of the error.

        The report has, by layer, the share of the product's mean square that is lost: by rounding to nearest, and
        by rounding with the data. Raises SettingsError for a layer without a plain weight.
        """
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
