"""Where the decoder layers are in a model of vLLM's, and how its loop over them can be cut short.

Nothing is known by an architecture's name: the decoder is the module whose forward loops over a list of layers that it
holds. In vLLM's own models that loop ends at `end_layer` (pipeline parallelism needs it); in a model of Hugging Face's,
which vLLM runs through its Transformers backend, it ends where the list ends."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import nn

from selfspec_cli.early_exit.errors import SettingsError

HEADS = ("lm_head", "output")
BOTH_WAYS = "PrefillPrefixLMAttention"
"""vLLM's class of attention in which all tokens of a step see each other."""


@dataclass(frozen=True)
class Place:
    """Where a model has its decoder layers.
    root: the module that takes (input_ids, positions, intermediate_tensors) and returns what `compute_logits` takes.
    path: names that lead from it to the decoder, the module with the loop. name: of the decoder's list of layers.
    ends_at_end_layer: whether the loop ends at the decoder's `end_layer`, else with the list."""

    root: nn.Module
    path: tuple[str, ...]
    name: str
    ends_at_end_layer: bool

    @property
    def modules(self) -> list[nn.Module]:
        """From the root to the decoder, both included."""
        return [reduce(getattr, self.path[:length], self.root) for length in range(len(self.path) + 1)]

    @property
    def decoder(self) -> nn.Module:
        """The module with the loop."""
        return self.modules[-1]

    @property
    def layers(self) -> nn.ModuleList:
        layers: nn.ModuleList = getattr(self.decoder, self.name)
        return layers


def place_of(model: nn.Module) -> Place:
    """Where the layers are inside a causal LM or a multimodal wrapper around one. Raises SettingsError, naming the
    architecture, where no forward loops over layers, or tokens of a step see later ones, which spoils verify passes."""
    inner = _inside(model)
    if any(type(part).__name__ == BOTH_WAYS for part in inner.modules()):
        raise SettingsError(
            f"architecture {type(inner).__name__} is not supported with early exit: the tokens of a step see each "
            f"other in both directions (vLLM's {BOTH_WAYS}), so that verified tokens would see the drafts after them, "
            "whatever drafts; serve it without a speculative_config"
        )
    root = inner if _takes_positions(inner) else model  # a wrapper may name a module of Hugging Face's
    spoken = {id(part) for part in inner.modules()}  # a wrapper also has towers for pictures
    candidates = [(path, module) for path, module in _by_depth(root) if id(module) in spoken]
    for end_layer in (True, False):
        for path, module in candidates:
            name = _looped_over(module, end_layer)
            if name is not None and (end_layer or _has_all(inner, getattr(module, name))):
                return Place(root, path, name, end_layer)
    raise SettingsError(
        f"architecture {type(inner).__name__} is not supported: no part of it has a forward that loops over a list of "
        "its layers, up to self.end_layer (what vLLM's pipeline parallelism uses) or to the end of the list, so it "
        "cannot be run up to an exit layer"
    )


def decoder_of(model: nn.Module) -> nn.Module:
    """The module that loops over the decoder layers. Raises SettingsError as `place_of` does."""
    return place_of(model).decoder


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers. Raises SettingsError as `place_of` does."""
    return list(place_of(model).layers)


def language_model(model: nn.Module) -> nn.Module:
    """The module that has the lm_head: the causal LM inside a multimodal wrapper; a causal LM is its own.
    Some wrappers (Idefics3) hold a decoder without an lm_head, and have that themselves."""
    inner = _inside(model)
    return inner if any(hasattr(inner, name) for name in ("compute_logits", *HEADS)) else model


def _inside(model: Any) -> Any:
    """What vLLM calls the language model of a multimodal wrapper: a causal LM, or its decoder alone."""
    return model.get_language_model() if hasattr(model, "get_language_model") else model


def _takes_positions(module: nn.Module) -> bool:
    """Whether a module is called as vLLM calls models; those of Hugging Face's are called with `position_ids`."""
    return "position_ids" not in inspect.signature(type(module).forward).parameters


def _by_depth(root: nn.Module) -> Iterator[tuple[tuple[str, ...], nn.Module]]:
    """Every module that may hold layers, the shallowest first, with the names that lead to it."""
    level: list[tuple[tuple[str, ...], nn.Module]] = [((), root)]
    while level:
        yield from level
        level = [
            ((*path, name), child)
            for path, module in level
            for name, child in module.named_children()
            if not isinstance(child, nn.ModuleList)
        ]


def _has_all(inner: nn.Module, layers: nn.ModuleList) -> bool:
    """Whether no layers of these kinds are in another list (Gemma 3n has two that run one after the other)."""
    kinds = {type(layer) for layer in layers}
    return sum(type(part) in kinds for part in inner.modules()) == len(layers)


# ---- which list a forward loops over --------------------------------------------------------------------------------


def _looped_over(module: nn.Module, end_layer: bool) -> str | None:
    """Name of the list of layers over which the forward of `module` loops; None for one that does not.
    end_layer: whether loops count that end at `self.end_layer`, or those that end with the list."""
    lists = {name for name, child in module.named_children() if isinstance(child, nn.ModuleList)}
    if not lists or (end_layer and not all(hasattr(module, name) for name in ("start_layer", "end_layer"))):
        return None
    for loop in _loops(module):
        over = _attributes(loop.iter)
        named = [name for name in _attributes(loop) if name in lists]
        if named and (("end_layer" in over) if end_layer else (named[0] in over and "end_layer" not in over)):
            return named[0]
    return None


def _loops(module: nn.Module) -> list[ast.For]:
    """The loops of the forward that runs. One that only passes on (Mistral's) is judged by what it passes on to."""
    classes: Any = type(module).__mro__
    for kind in (kind for kind in classes if "forward" in vars(kind)):
        # The compile decorator replaces __call__, not forward, so this is the source that runs.
        try:
            source = inspect.getsource(inspect.unwrap(kind.forward))
        except (OSError, TypeError):  # PyTorch's own modules, of which some have no source
            return []
        nodes = list(ast.walk(ast.parse(textwrap.dedent(source))))
        if loops := [node for node in nodes if isinstance(node, ast.For)]:
            return loops
        if not any(isinstance(node, ast.Call) and ast.unparse(node.func) == "super().forward" for node in nodes):
            return []
    return []


def _attributes(node: ast.AST) -> list[str]:
    """Names of the attributes of `self` below `node`, in the order of the source."""
    found = [part for part in ast.walk(node) if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self"]
    return [part.attr for part in sorted(found, key=lambda part: (part.lineno, part.col_offset))]


# ---- its ends -------------------------------------------------------------------------------------------------------

EMBEDDINGS = ("embed_tokens", "tok_embeddings", "word_embeddings")


def input_embedding(model: nn.Module) -> nn.Module:
    """Token ids -> hidden states: what vLLM holds a vocabulary's rows with, or one of the usual names.
    Raises SettingsError, naming the architecture, if there is none."""
    place = place_of(model)
    decoder: Any = place.decoder
    found = next((part for part in _outside_layers(decoder) if _is_vocabulary(part)), None)
    found = found or next((getattr(decoder, name) for name in EMBEDDINGS if hasattr(decoder, name)), None)
    if not isinstance(found, nn.Module):
        raise SettingsError(
            f"architecture {type(language_model(model)).__name__} is not supported: its input embedding is none of "
            f"{', '.join(EMBEDDINGS)}, and no vocabulary of vLLM's"
        )
    return found


def output_projection(model: nn.Module) -> nn.Module:
    """Hidden states -> logits: the lm_head, or the input embedding where a model has none of its own."""
    owner: Any = language_model(model)
    named = (getattr(owner, name, None) for name in HEADS)
    found = next((head for head in named if isinstance(head, nn.Module)), None)
    typed = (part for part in _outside_layers(owner) if type(part).__name__ == "ParallelLMHead")
    return found or next(typed, None) or input_embedding(model)


def _outside_layers(module: nn.Module) -> Iterator[nn.Module]:
    return (part for _, part in _by_depth(module))


def _is_vocabulary(module: nn.Module) -> bool:
    """Whether a module is vLLM's embedding of tokens, and no lm_head."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return "VocabParallelEmbedding" in names and "ParallelLMHead" not in names


def has_experts(part: nn.Module) -> bool:
    return any("Experts" in type(module).__name__ or "MoE" in type(module).__name__ for module in part.modules())
