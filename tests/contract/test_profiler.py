"""What selfspec's ranges and PyTorch's profiler leave in a trace is what stages/profile.py reads."""

import gzip
import json
import time
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.output_processor import OutputProcessor

from selfspec_cli.record.quality import PARTS
from selfspec_cli.stages.profile import PART_OF, PREFIX, breakdown
from selfspec_cli.vllm_plugin.observe import profiler


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
def front_end(monkeypatch):
    """vLLM's classes, which keep no range beyond the test."""
    for name in ("schedule", "update_from_output"):
        monkeypatch.setattr(Scheduler, name, getattr(Scheduler, name))
    monkeypatch.setattr(OutputProcessor, "process_outputs", OutputProcessor.process_outputs)


def test_a_trace_has_the_ranges_that_a_profile_is_made_of(tmp_path, front_end):
    runner, drafter = Runner(Model()), Drafter()
    names = profiler.annotate(runner, drafter)
    assert [name.removeprefix("selfspec.") for name in names] == [
        *("verify", "sample", "draft", "logits", "trunk", "head", "gate", "schedule", "detokenise")
    ]
    assert {PART_OF.get(name.removeprefix(PREFIX), name.removeprefix(PREFIX)) for name in names} < set(PARTS)
    x, file, device = torch.ones(256, 256), tmp_path / "trace.json.gz", torch.device("cpu")
    recording = profiler.start(device)
    for _ in range(3):
        runner.execute_model(x)
        runner.sample_tokens(x)
        drafter.propose(x)
    kernels = profiler.stop(recording, device, str(file))
    found = breakdown(json.loads(gzip.decompress(file.read_bytes()))["traceEvents"])
    assert found["rounds"] == 3 and not found["gpu"]
    assert set(found["seconds"]) == {"trunk", "head", "gate", "draft", "verify", "sampler", "idle"}
    assert sum(found["seconds"].values()) == pytest.approx(found["wall"])
    assert found["seconds"]["gate"] >= 3 * 0.002
    calls = {kernel["name"]: kernel["calls"] for kernel in kernels}
    assert calls["aten::mm"] == 3 * 4 and not any(name.startswith(PREFIX) for name in calls)


def test_an_engine_gets_each_range_once_and_a_baseline_none_of_drafting(front_end):
    assert not {"selfspec.draft", "selfspec.head", "selfspec.gate"} & set(profiler.annotate(Runner(Model()), None))
    runner, drafter = Runner(Model()), Drafter()
    names = profiler.annotate(runner, drafter)
    placed = runner.execute_model, Scheduler.schedule, drafter.end_step
    assert profiler.annotate(runner, drafter) == names
    assert (runner.execute_model, Scheduler.schedule, drafter.end_step) == placed
    assert Scheduler.schedule.selfspec_range == "selfspec.schedule"
