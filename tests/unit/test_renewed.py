"""Copies in a draft are filled anew in place; what it shares with the target stays shared."""

from types import SimpleNamespace

import torch
from torch import nn

from selfspec_cli.vllm_plugin.weights.renewed import Watch, keep_weights_asleep, refill


class Layer(nn.Module):
    def __init__(self, shared, copied):
        super().__init__()
        self.norm = shared
        self.copy = nn.Linear(2, 2, bias=False)
        self.copy.weight.data.fill_(copied)
        self.register_buffer("scale", torch.tensor([float(copied)]))


def test_tensors_of_its_own_are_filled_where_they_are():
    norm = nn.LayerNorm(2)
    old, new = Layer(norm, 1.0), Layer(norm, 3.0)
    places = old.copy.weight.data_ptr(), old.scale.data_ptr()
    with torch.inference_mode():
        refill(old, new)
    assert old.norm is norm
    assert old.copy.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]] and old.scale.tolist() == [3.0]
    assert places == (old.copy.weight.data_ptr(), old.scale.data_ptr())  # CUDA graphs hold them


def test_a_load_past_vllms_own_calls_is_noticed():
    loaded = []
    model = nn.Module()
    model.load_weights = lambda weights: loaded.extend(weights) or {"names"}
    watch = Watch(model)
    assert not watch.stale
    assert model.load_weights([1]) == {"names"} and loaded == [1]
    assert watch.stale


def test_sleep_drops_nothing_that_new_weights_do_not_bring_back():
    levels = []
    sleep = keep_weights_asleep(lambda worker, level=1: levels.append(level))
    ours = SimpleNamespace(speculator=SimpleNamespace(renew=None))
    others = SimpleNamespace(speculator=SimpleNamespace())
    for runner in (ours, others, SimpleNamespace()):
        worker = SimpleNamespace(model_runner=runner)
        sleep(worker)
        sleep(worker, 2)
        sleep(worker, level=0)
    assert levels == [1, 1, 0, 1, 2, 0, 1, 2, 0]
