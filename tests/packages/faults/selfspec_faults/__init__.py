"""Faults that `selfspec verify` and `selfspec check` plant in an engine of their own, to show that they find them.

v1.py and v2.py change outputs on each model runner, speed.py costs speed alone. Two more, of the verify pass, are part
of every verification: `selfspec_cli/vllm_plugin/planted/`. The worker there imports this package where selfspec runs
from a checkout.
"""

from torch import Tensor


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
