"""Subclasses of vLLM's worker, scheduler and model runners: what names them, what they override, what they leave."""

from __future__ import annotations

import inspect
import pickle
import sys
import types
from types import SimpleNamespace

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu import model_runner as v2_runner
from vllm.v1.worker.gpu.spec_decode import rejection_sampler as v2_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from selfspec_cli.vllm_plugin import compat, overrides, register, subclasses
from selfspec_cli.vllm_plugin.overrides import SCHEDULER, WORKER, overriding, subclass_of
from selfspec_cli.vllm_plugin.v2.sampler import with_short_draft_sampler

pytestmark = pytest.mark.contract


def resolved(name):
    """What vLLM finds under a dotted name of a class."""
    return resolve_obj_by_qualname(name)


def config_of(folder, **arguments):
    register()
    args = EngineArgs(str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=64, **arguments)
    return args.create_engine_config()


EARLY_EXIT = {"speculative_config": {"method": "layer_skip", "num_speculative_tokens": 2}}
FITTING = {"additional_config": {"selfspec_collect": [2]}}
SKIP = {"speculative_config": {"method": "skip", "layer_skip": 2}}


@pytest.mark.parametrize("asks", [EARLY_EXIT, FITTING, SKIP], ids=["drafts", "fitting", "skip"])
def test_an_engine_that_asks_has_our_worker_and_scheduler_and_a_plain_one_vllms(folder, asks):
    plain = config_of(folder)
    assert plain.scheduler_config.scheduler_cls is None
    assert not plain.parallel_config.worker_cls.startswith("selfspec_cli")
    asking = config_of(folder, **asks)
    worker = resolved(asking.parallel_config.worker_cls)
    assert worker.__bases__[0] is resolved(plain.parallel_config.worker_cls)
    assert asking.scheduler_config.get_scheduler_cls() is subclasses.scheduler


def test_the_configuration_of_an_engine_goes_to_other_processes_with_the_names(folder):
    sent = pickle.loads(pickle.dumps(config_of(folder, **EARLY_EXIT)))
    assert sent.scheduler_config.get_scheduler_cls() is subclasses.scheduler
    assert resolved(sent.parallel_config.worker_cls).sleep.__wrapped__


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_scheduler_is_asynchronous_where_the_engine_is(make, asynchronous):
    made = make(asynchronous)
    assert type(made).__bases__[0] is (AsyncScheduler if asynchronous else Scheduler)
    assert made.early_exit_planner is not None


@pytest.fixture
def theirs(monkeypatch):
    """A module of a user with a scheduler and a worker."""
    module = types.ModuleType("users.own")
    module.Fair = type("Fair", (Scheduler,), {"__module__": "users.own"})
    module.Loud = type("Loud", (Worker,), {"__module__": "users.own"})
    monkeypatch.setitem(sys.modules, "users", types.ModuleType("users"))
    monkeypatch.setitem(sys.modules, "users.own", module)
    return module


@pytest.mark.parametrize("as_class", [True, False], ids=["a class", "a name"])
def test_a_scheduler_and_a_worker_of_the_user_are_subclassed_once(theirs, as_class):
    args = SimpleNamespace(scheduler_cls=theirs.Fair if as_class else "users.own.Fair")
    parallel = SimpleNamespace(worker_cls="users.own.Loud")
    overrides.name_in(args, parallel)
    once = args.scheduler_cls, parallel.worker_cls
    assert resolved(once[0]).__bases__[0] is theirs.Fair
    assert resolved(once[1]).__bases__[0] is theirs.Loud
    overrides.name_in(args, parallel)
    assert (args.scheduler_cls, parallel.worker_cls) == once


def test_another_name_is_no_attribute():
    with pytest.raises(AttributeError, match="has no attribute 'Worker'"):
        subclasses.Worker  # noqa: B018 - the look-up is what is tested


def test_an_extension_that_is_mixed_into_a_worker_is_found_in_the_subclass(theirs):
    """vLLM refuses an extension whose names a worker has, unless it is among the bases of the worker's class."""

    class Extension:
        def more(self):
            return "more"

    theirs.Loud.__bases__ += (Extension,)
    kind = resolved(subclass_of("users.own.Loud", WORKER))
    assert Extension in kind.__bases__ and kind.more(None) == "more"


def test_each_override_gets_the_method_of_the_base_and_leaves_the_base_alone():
    class Base:
        def step(self):
            return "base"

    kind = overriding(Base, {"step": lambda original: lambda self: f"ours around {original(self)}"})
    assert (kind().step(), Base().step()) == ("ours around base", "base")
    assert isinstance(kind(), Base) and kind.__module__ == overrides.__name__


@pytest.mark.parametrize("v2", [True, False])
def test_a_worker_prepares_vllm_before_it_makes_its_device_and_adopts_the_runner_after_it(theirs, monkeypatch, v2):
    order = []
    monkeypatch.setattr(compat, "apply", lambda stage: order.append(stage))
    monkeypatch.setattr(subclasses, "adopt", lambda runner, v2: order.append((runner, v2)))
    theirs.Loud.init_device = lambda self: order.append("device") or setattr(self, "model_runner", "runner")
    worker = object.__new__(resolved(subclass_of("users.own.Loud", WORKER)))
    worker.use_v2_model_runner = v2
    worker.init_device()
    assert order == ["worker", "device", ("runner", v2)]


def test_a_scheduler_prepares_the_engine_core_before_it_is_made(theirs, monkeypatch):
    """An engine core makes its scheduler, and then chooses by which method it steps."""
    asked = []
    monkeypatch.setattr(compat, "apply", asked.append)
    resolved(subclass_of("users.own.Fair", SCHEDULER))
    assert asked == ["scheduler"]
    source = inspect.getsource(EngineCore.__init__)
    assert source.index("get_scheduler_cls()") < source.index("self.step_fn = ")


def test_a_v1_runner_that_is_adopted_has_our_samplers_over_its_own(monkeypatch):
    runner = object.__new__(GPUModelRunner)
    runner.sampler = Sampler("processed_logprobs")
    runner.rejection_sampler = RejectionSampler(runner.sampler)
    subclasses.adopt(runner, v2=False)
    assert type(runner).__bases__[0] is GPUModelRunner
    assert isinstance(runner.sampler, Sampler) and type(runner.sampler) is not Sampler
    assert runner.rejection_sampler.sampler is runner.sampler
    assert runner.rejection_sampler.is_processed_logprobs_mode
    for kind in (GPUModelRunner, Sampler, RejectionSampler):
        ours = [name for name, value in vars(kind).items() if "selfspec" in str(getattr(value, "__module__", ""))]
        assert not ours


def test_a_v2_runners_rejection_sampler_is_ours_with_what_it_was_made_with():
    made = object.__new__(v2_sampler.RejectionSampler)
    made.sampler = "sampler"

    def load_model(self, load_dummy_weights=False):
        self.rejection_sampler = made

    runner = object.__new__(v2_runner.GPUModelRunner)
    with_short_draft_sampler(load_model)(runner)
    assert isinstance(runner.rejection_sampler, v2_sampler.RejectionSampler) and runner.rejection_sampler is not made
    assert runner.rejection_sampler.sampler == "sampler"
    with_short_draft_sampler(lambda self: setattr(self, "rejection_sampler", None))(runner)
    assert runner.rejection_sampler is None  # without speculation there is none
