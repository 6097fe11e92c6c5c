"""Putting something in the place of an attribute, and taking it out again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Undo = Callable[[], None]


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> Undo:
    """owner.name becomes make(owner.name); the function returned takes it back."""
    original, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, make(original))

    def undo() -> None:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)

    return undo


class Wrapped:
    """In place of a sampler: calls go to `call`, attributes are the sampler's."""

    def __init__(self, original: Any, call: Callable[..., Any]) -> None:
        self._original, self._call = original, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def spoil(cache: Tensor, slots: Tensor, num_blocks: int, block_size: int) -> None:
    """Permute the features of keys and values at some slots of a layer's KV cache, whatever its layout.

    cache: any shape with one dimension of num_blocks (or a multiple, where a kernel's blocks are smaller) and one of a
    block's slots. slots: block * block_size + place in it.
    """
    blocks = next(at for at, size in enumerate(cache.shape) if size >= num_blocks and size % num_blocks == 0)
    length = num_blocks * block_size // cache.shape[blocks]
    for slot in slots.tolist():
        if slot < 0:
            continue
        part = cache.select(blocks, slot // length)
        inner = next((at for at, size in enumerate(part.shape) if size == length), None)
        entry = part if inner is None else part.select(inner, slot % length)
        entry.copy_(entry.roll(1, -1))
