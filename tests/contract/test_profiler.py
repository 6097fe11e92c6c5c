"""What selfspec's ranges and PyTorch's profiler leave in a trace is what report/trace.py reads."""

import time
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler

from selfspec_cli.report import trace
from selfspec_cli.vllm_plugin.observe.annotate import annotate, annotate_frontend
from selfspec_cli.vllm_plugin.observe.profiler import Profiler, weights_in_order

pytestmark = pytest.mark.contract


class Model:
    def compute_logits(self, x):
        return torch.mm(x, x)


class Runner:
    def __init__(self, model):
        self.model = model

    def get_model(self):
        return self.model

    def execute_model(self, x):
        return self.model.compute_logits(torch.mm(x, x))

    def sample_tokens(self, x):
        return x.argmax(-1)


class EndStep:
    """Called as an object, like the V2 runner's."""

    def __call__(self, x):
        time.sleep(0.002)
        return x


class Drafter:
    def __init__(self):
        self.head, self.end_step = SimpleNamespace(logits=lambda x: torch.mm(x, x)), EndStep()

    def _forward(self, x):
        return torch.mm(x, x)

    def propose(self, x):
        return self.end_step(self.head.logits(self._forward(x)))


@pytest.fixture
def scheduler(monkeypatch):
    """vLLM's scheduler class, which keeps no range beyond the test."""
    for name in ("schedule", "update_from_output"):
        monkeypatch.setattr(Scheduler, name, getattr(Scheduler, name))
    return Scheduler


def test_a_trace_has_the_ranges_on_the_clock_of_this_process(tmp_path, scheduler):
    runner, drafter = Runner(Model()), Drafter()
    frontend = SimpleNamespace(step=lambda x: engine_step(x), output_processor=SimpleNamespace(process_outputs=str))

    def engine_step(x):
        runner.execute_model(x)
        runner.sample_tokens(x)
        drafter.propose(x)
        return frontend.output_processor.process_outputs(1)

    names = [*annotate(runner, drafter), *annotate_frontend(frontend)]
    assert names == [
        f"selfspec.{name}"
        for name in ("verify", "sample", "draft", "logits", "trunk", "head", "gate", "schedule", "step", "detokenise")
    ]
    assert {name.removeprefix("selfspec.") for name in names} == set(trace.PART_OF)
    x, file = torch.ones(256, 256), tmp_path / "trace.json.gz"
    profiler = Profiler(torch.device("cpu"))
    begin = time.time_ns()
    for _ in range(3):
        frontend.step(x)
    end = time.time_ns()
    profiler.stop(str(file))
    wall = (end - begin) / 1e9
    found = trace.breakdown(trace.read(file, begin), [], wall, weights={"full": [100, 200], "draft": [30, 40]})
    assert found.rounds == 3 and not found.gpu and found.doubts == []
    assert sum(found.seconds.values()) == pytest.approx(wall, rel=0.05)
    assert found.seconds["gate"] >= 3 * 0.002
    read = {(one.name, one.part): (one.calls, one.bytes) for one in found.kernels if one.bytes}
    assert read == {("aten::mm", "verify"): (6, 900), ("aten::mm", "trunk"): (3, 90), ("aten::mm", "head"): (3, 120)}


def test_an_engine_gets_each_range_once(scheduler):
    runner, drafter = Runner(Model()), Drafter()
    names = annotate(runner, drafter)
    placed = runner.execute_model, scheduler.schedule, drafter.end_step
    assert annotate(runner, drafter) == names
    assert (runner.execute_model, scheduler.schedule, drafter.end_step) == placed
    assert scheduler.schedule.selfspec_range == "selfspec.schedule"


def test_a_baseline_has_no_ranges_of_drafting(scheduler):
    assert not {"selfspec.draft", "selfspec.head", "selfspec.gate"} & set(annotate(Runner(Model()), None))


class Decoder(torch.nn.Module):
    """Cuts its loop where vLLM's decoders do."""

    def __init__(self, layers):
        super().__init__()
        self.layers, self.start_layer, self.end_layer = torch.nn.ModuleList(layers), 0, len(layers)

    def forward(self, x):
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            x = layer(x)
        return x


def test_weights_are_in_the_order_of_a_pass():
    from torch import nn
    from vllm.model_executor.layers.linear import LinearBase

    def linear(size):
        made = object.__new__(LinearBase)  # without the parallel groups that its __init__ asks for
        nn.Module.__init__(made)
        made.weight = nn.Parameter(torch.zeros(size), requires_grad=False)
        return made

    def layer(size):
        made = nn.Module()
        made.qkv, made.norm, made.down = linear(size), nn.LayerNorm(4), linear(2 * size)
        return made

    target = nn.Module()
    target.model, target.lm_head = Decoder([layer(3), layer(5)]), nn.Linear(7, 1, bias=False)
    trunk = SimpleNamespace(drafting_layers=tuple(target.model.layers[:1]))
    head = SimpleNamespace(reads_lm_head=False, tensors=[torch.zeros(11)])
    found = weights_in_order(target, SimpleNamespace(head=head, model=trunk))
    assert found == {"full": [12, 24, 20, 40, 28], "draft": [12, 24, 44]}
    target.model = nn.Linear(2, 2)  # no loop that could be cut: nothing is known of what a step reads
    assert weights_in_order(target, None) is None
