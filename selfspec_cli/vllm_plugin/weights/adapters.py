"""The target without LoRA adapters, over the same weights.

Drafts are made without the adapter of a request. The verify pass, which decides on every token, runs with it, so the
output is the adapted model's own; the further an adapter moves the model, the fewer drafts are accepted. vLLM sets
which token has which adapter once for a step of the target, and a draft loop that runs on the device cannot ask it to
do so again.
"""

from torch import nn

from selfspec_cli.vllm_plugin.weights.replace import with_replaced


def without_adapters(model: nn.Module) -> nn.Module:
    """`model` with every layer that can hold adapters replaced by the layer that it wraps; `model` itself if none is.

    Nothing is copied, and `model` is not changed. Adapters of experts are not found: vLLM applies them in the experts'
    kernels.
    """
    from selfspec_cli.vllm_plugin.vllm_names import BaseLayerWithLoRA

    def make(module: nn.Module, name: str) -> nn.Module | None:
        base: nn.Module | None = module.base_layer if isinstance(module, BaseLayerWithLoRA) else None
        return base

    return with_replaced(model, make)
