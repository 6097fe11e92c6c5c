"""Subclasses of vLLM's worker, scheduler and model runners: what names them, what they override, what they leave."""

import ast
import sys
import types
from types import SimpleNamespace

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname as resolved
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu import model_runner as v2_runner
from vllm.v1.worker.gpu.spec_decode import rejection_sampler as v2_sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm_source import V1_RUNNER, V2_RUNNER, WORKER

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.vllm_plugin import compat, overrides, subclasses
from selfspec_cli.vllm_plugin.overrides import subclass_of
from selfspec_cli.vllm_plugin.v2.runner import with_short_draft_sampler

EARLY_EXIT = {"spec": {"method": "layer_skip", "num_speculative_tokens": 2}}
FITTING = {"additional_config": {"selfspec_collect": [2]}}
SKIP = {"spec": {"method": "skip", "layer_skip": 2}}


@pytest.mark.parametrize("asks", [EARLY_EXIT, FITTING, SKIP], ids=["drafts", "fitting", "skip"])
def test_an_engine_that_asks_has_our_worker_and_scheduler_and_a_plain_one_vllms(configured, asks):
    plain = configured()
    assert plain.scheduler_config.scheduler_cls is None
    assert not plain.parallel_config.worker_cls.startswith("selfspec_cli")
    asking = configured(**asks)
    worker = resolved(asking.parallel_config.worker_cls)
    assert worker.__bases__[0] is resolved(plain.parallel_config.worker_cls)
    assert asking.scheduler_config.get_scheduler_cls() is subclasses.scheduler


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
    kind = resolved(subclass_of("users.own.Loud", overrides.WORKER))
    assert Extension in kind.__bases__ and kind.more(None) == "more"
    assert kind.__module__ == subclasses.__name__  # by which other processes find it


@pytest.mark.parametrize("v2", [True, False])
def test_a_worker_prepares_vllm_before_it_makes_its_device_and_adopts_the_runner_after_it(theirs, monkeypatch, v2):
    order = []
    monkeypatch.setattr(compat, "apply", lambda stage: order.append(stage))
    monkeypatch.setattr(subclasses, "adopt", lambda runner, v2: order.append((runner, v2)))
    theirs.Loud.init_device = lambda self: order.append("device") or setattr(self, "model_runner", "runner")
    own = dict(vars(theirs.Loud))
    worker = object.__new__(resolved(subclass_of("users.own.Loud", overrides.WORKER)))
    worker.use_v2_model_runner = v2
    worker.init_device()
    assert order == ["worker", "device", ("runner", v2)]
    assert vars(theirs.Loud) == own  # the base is left as it is


def test_a_scheduler_prepares_the_engine_core_before_it_is_made(theirs, monkeypatch):
    """An engine core makes its scheduler, and then chooses by which method it steps."""
    asked = []
    monkeypatch.setattr(compat, "apply", asked.append)
    resolved(subclass_of("users.own.Fair", overrides.SCHEDULER))
    assert asked == ["scheduler"]


def test_a_v1_runner_that_is_adopted_has_our_samplers_over_its_own():
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


# ---- How an engine on CUDA comes to them, in the source of each supported release; vllm_says.toml has more


@pytest.mark.parametrize(("platform", "device"), [("cuda", "cuda"), ("rocm", "cuda"), ("cpu", "cpu")])
def test_each_platform_has_the_worker_that_is_subclassed(vllm, platform, device):
    text = vllm.text(f"vllm.platforms.{platform}")
    assert f'parallel_config.worker_cls = "{overrides.USUAL_WORKERS[device]}"' in text
    assert f'device_type: str = "{device}"' in text
    module, _, name = overrides.USUAL_WORKERS[device].rpartition(".")
    assert vllm.find(f"{module}:{name}") is not None


def test_on_any_other_device_early_exit_is_refused_before_a_worker_is_named(monkeypatch):
    """An XPU has a worker of its own, which the GPU's would stand in for."""
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(device_type="xpu"))
    args, parallel = SimpleNamespace(scheduler_cls=None), SimpleNamespace(worker_cls="auto")
    with pytest.raises(SettingsError, match="not supported on xpu; allowed: cpu and cuda"):
        overrides.name_in(args, parallel)
    assert parallel.worker_cls == "auto"


def read_on_self(vllm, target, names):
    """Of these names, those that a class reads on self other than to call them at once."""
    kept = set()
    for kind in vllm.classes(target):
        called = {id(node.func) for node in ast.walk(kind) if isinstance(node, ast.Call)}
        for node in ast.walk(kind):
            if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "self":
                kept |= set() if id(node) in called else {node.attr}
    return kept


@pytest.mark.parametrize("v2", [True, False])
def test_nothing_keeps_a_method_of_a_runner_that_its_subclass_overrides(vllm, v2):
    runner = f"{V2_RUNNER if v2 else V1_RUNNER}:GPUModelRunner"
    names = set(subclasses._of_v2_runner() if v2 else subclasses._of_v1_runner())
    assert "sample_tokens" in names and names <= vllm.attributes(runner)
    assert not read_on_self(vllm, runner, names)
    init = next(node for node in next(vllm.classes(runner)).body if getattr(node, "name", "") == "__init__")
    calls = {ast.unparse(node.func) for node in ast.walk(init) if isinstance(node, ast.Call)}
    assert not calls & {f"self.{name}" for name in names}, "called before the runner has its class"


def test_a_workers_own_methods_are_kept_only_by_what_runs_after_its_runner_is_there(vllm):
    """Warm-up is handed `sample_tokens` and `execute_model`, after a model is loaded; we override neither of them."""
    names = set(subclasses._of_worker())
    assert names == {"init_device", "reload_weights", "finish_weight_update", "sleep"} <= vllm.attributes(WORKER)
    assert not read_on_self(vllm, WORKER, names)


def test_only_the_runner_holds_the_v2_rejection_sampler(vllm):
    """Ours takes its place after `load_model`; another holder would go on verifying with vLLM's."""
    tree = vllm.tree(V2_RUNNER)
    loads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "rejection_sampler"]
    handed = {
        ast.unparse(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for argument in [*node.args, *(word.value for word in node.keywords)]
    }
    assert loads and "self.rejection_sampler" not in handed
