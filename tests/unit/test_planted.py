"""What faults are planted with: a spoilt KV cache, and wrapping on a live engine. The faults themselves are planted in
engines (tests/engine/test_verify.py, tests/engine/v2/test_v2_faults.py)."""

import pytest
import torch
from selfspec_faults import spoil

from selfspec_cli.vllm_plugin.wrap import wrap


@pytest.mark.parametrize(
    ("shape", "blocks", "size"),
    [((2, 8, 4, 3, 5), 8, 4), ((8, 4, 5), 8, 4), ((8, 2, 3, 4, 5), 8, 4), ((2, 16, 2, 3, 5), 8, 4)],
    ids=["keys first", "latent", "slots after heads", "a kernel's blocks are smaller"],
)
def test_one_slot_is_spoilt_whatever_the_layout(shape, blocks, size):
    cache = torch.randn(shape)
    before = cache.clone()
    spoil(cache, torch.tensor([6, -1]), blocks, size)
    changed = (cache != before).sum()
    slots = blocks * size
    assert 0 < int(changed) <= cache.numel() // slots


def test_what_was_wrapped_comes_back():
    class Thing:
        def method(self):
            return 1

    thing = Thing()
    undo = wrap(thing, "method", lambda original: lambda: original() + 1)
    assert thing.method() == 2
    undo()
    assert thing.method() == 1
    assert "method" not in vars(thing)
