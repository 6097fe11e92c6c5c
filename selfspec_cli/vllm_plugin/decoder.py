"""Where the decoder layers are in a model that vLLM has loaded, and whether they can be cut short."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from torch import nn

from selfspec_cli.early_exit.errors import SettingsError


def language_model(model: Any) -> nn.Module:
    """The module that has the lm_head: the causal LM inside a multimodal wrapper; a causal LM is its own.

    Some wrappers (Idefics3) hold a decoder without an lm_head, and have that themselves.
    """
    inner = _inside(model)
    return model if _cuts_at_end_layer(inner) else inner


def _inside(model: Any) -> Any:
    """What vLLM calls the language model of a multimodal wrapper: a causal LM, or its decoder alone."""
    return model.get_language_model() if hasattr(model, "get_language_model") else model


def decoder_of(model: nn.Module) -> nn.Module:
    """The module that loops over the decoder layers, inside a causal LM or a multimodal wrapper around one.

    Raises SettingsError, naming the architecture, if its forward does not cut its own loop at `end_layer`.
    """
    inner = _inside(model)
    decoder = inner if _cuts_at_end_layer(inner) else getattr(inner, "model", None)
    if not isinstance(decoder, nn.Module) or not _cuts_at_end_layer(decoder):
        raise SettingsError(
            f"architecture {type(inner).__name__} is not supported: its forward has no loop over self.layers that ends "
            "at self.end_layer (what vLLM's pipeline parallelism uses), so it cannot be run up to an exit layer"
        )
    return decoder


def _cuts_at_end_layer(decoder: Any) -> bool:
    if not all(hasattr(decoder, name) for name in ("layers", "start_layer", "end_layer")):
        return False
    # The compile decorator replaces __call__, not forward, so this is the source that runs.
    classes: Any = type(decoder).__mro__
    for kind in (kind for kind in classes if "forward" in vars(kind)):
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))))
        loops = [part for node in nodes if isinstance(node, ast.For) for part in ast.walk(node.iter)]
        if any(isinstance(part, ast.Attribute) and part.attr == "end_layer" for part in loops):
            return True
        if not any(isinstance(node, ast.Call) and ast.unparse(node.func) == "super().forward" for node in nodes):
            return False  # a forward of its own; one that only passes on (Mistral's) is judged by what it passes on to
    return False


def input_embedding(model: nn.Module) -> nn.Module:
    """Token ids -> hidden states, by whichever name the architecture has for it.

    Raises SettingsError, naming the architecture, if it has none of them.
    """
    decoder, names = decoder_of(model), ("embed_tokens", "tok_embeddings", "word_embeddings")
    for name in names:
        if hasattr(decoder, name):
            found: nn.Module = getattr(decoder, name)
            return found
    raise SettingsError(
        f"architecture {type(language_model(model)).__name__} is not supported: its input embedding is none of "
        f"{', '.join(names)}"
    )


def output_projection(model: nn.Module) -> nn.Module:
    """Hidden states -> logits: the lm_head, or the input embedding where a model has none of its own."""
    heads = (getattr(language_model(model), name, None) for name in ("lm_head", "output"))
    return next((head for head in heads if isinstance(head, nn.Module)), None) or input_embedding(model)


def has_experts(part: nn.Module) -> bool:
    """Whether a mixture of experts is in `part`."""
    return any("Experts" in type(module).__name__ or "MoE" in type(module).__name__ for module in part.modules())
