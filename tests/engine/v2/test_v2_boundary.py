"""What an engine with early exit changes in vLLM, names and live objects, is in patches.py, and nothing else is."""

import os
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness import greedy, layer_skip, live, ragged_prompts
from models import LAYERS, VOCAB

from selfspec_cli.vllm_plugin import subclasses
from selfspec_cli.vllm_plugin.patches import CHANGES

HERE = Path(__file__).parent
PROMPTS = ragged_prompts(3, VOCAB, seed=2)
SMALL: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_memory_bytes": 2**25}


def ours(value: Any) -> bool:
    """Whether a function, a class or an object is made by selfspec, whatever it says that it wraps."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        file = Path(value.__code__.co_filename)
        return "selfspec_cli" in file.parts and file.name != "interpreted.py"  # Triton's, which kernels' modules hold
    kind = value if isinstance(value, type) else type(value)
    return str(kind.__module__).startswith("selfspec_cli")


def replaced_names() -> set[str]:
    """ "module:name" or "module:Class.name" of what is ours in vLLM's modules and in its classes."""
    found = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("vllm") or module is None:
            continue
        for key, value in list(vars(module).items()):
            if ours(value):
                found.add(f"{name}:{key}")
            elif isinstance(value, type) and value.__module__ == name:
                found |= {f"{name}:{value.__name__}.{own}" for own, one in list(vars(value).items()) if ours(one)}
    return found


def subclassed(one: Any) -> bool:
    """Whether an object is of a subclass that an engine has in the place of vLLM's class."""
    return type(one).__module__ == subclasses.__name__


def objects(start: Any) -> Iterator[Any]:
    """vLLM's objects that an engine is made of, our subclasses among them, and the model, through attributes and small
    containers; not through other objects of ours, which names that are replaced have put there."""
    seen, waiting = dict[int, Any](), [start]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or (ours(one) and not subclassed(one)):
            continue
        seen[id(one)] = one
        if isinstance(one, (dict, list, tuple)):
            waiting += list(one.values() if isinstance(one, dict) else one)[:50]
        elif (type(one).__module__.startswith("vllm") or subclassed(one)) and hasattr(one, "__dict__"):
            yield one
            waiting += list(vars(one).values())


def changed(engine: Any) -> set[str]:
    """Attributes of vLLM's live objects that are ours, by their name, or functions; and the class of one that vLLM has
    made of its own. What a subclass of ours keeps for itself is no change."""
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
    from vllm.v1.worker.worker_base import WorkerBase

    every = list(objects(engine.llm.llm_engine))
    made_as_ours = (SchedulerInterface, WorkerBase, RejectionSampler)  # by vLLM, which is given the name, or by us
    exchanged = [one for one in every if subclassed(one) and not isinstance(one, made_as_ours)]
    return {f"{type(one).__bases__[0].__name__}.__class__" for one in exchanged} | {
        f"{type(one).__name__}.{name}"
        for one in every
        if not subclassed(one)
        for name, value in vars(one).items()
        if (name.startswith(("early_exit", "selfspec")) and value is not None)
        or (isinstance(value, (types.FunctionType, types.MethodType)) and ours(value))
    }


def attributes_by_class(engine: Any) -> dict[str, set[str]]:
    """Attributes that vLLM's live objects have, by their class; those of our subclasses are left out."""
    found: dict[str, set[str]] = {}
    for one in objects(engine.llm.llm_engine):
        if not subclassed(one):
            found.setdefault(type(one).__name__, set()).update(vars(one))
    return found


def attributes(found: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in found}


NAMES = """
from selfspec_cli.vllm_plugin.interpreted import interpret_kernels

interpret_kernels()
from test_v2_boundary import replaced_names
import vllm.engine.arg_utils, vllm.v1.worker.gpu.model_runner, vllm.v1.worker.gpu_worker
from selfspec_cli.vllm_plugin import compat, register
from selfspec_cli.vllm_plugin.patches import PATCHES
from selfspec_cli.vllm_plugin.v2 import scheduling

register()
everywhere = {patch.target for patch in PATCHES if patch.stage == "config"}
assert 0 < len(replaced_names()) and replaced_names() <= everywhere, replaced_names() - everywhere
for stage in ("config", "scheduler", "worker"):
    compat.apply(stage)
listed = {patch.target for patch in PATCHES}
assert replaced_names() == listed, replaced_names() ^ listed
vllm.v1.worker.gpu_worker.Worker.more = scheduling.plan_drafts
print(sorted(replaced_names() - listed))
"""


def test_names_that_are_replaced_are_those_of_the_list_and_one_more_is_found():
    """In a process of its own, where no engine has started. A plain engine has some of them."""
    paths = [str(HERE), str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.run([sys.executable, "-c", NAMES], env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.strip().endswith("['vllm.v1.worker.gpu_worker:Worker.more']"), run.stdout + run.stderr[-3000:]


def test_what_is_changed_on_live_objects_is_in_the_list_and_nothing_on_those_of_a_plain_engine(model_dir, report):
    with live(model_dir("llama"), worker_extension_cls="", **SMALL) as engine:
        engine.generate(PROMPTS, greedy(6))
        assert changed(engine) == set()
        plain = attributes_by_class(engine)
    with live(model_dir("llama"), layer_skip(LAYERS // 2, 3), **SMALL) as engine:
        engine.generate(PROMPTS, greedy(6))
        engine.counts().require_both_verdicts()
        found = changed(engine)
        core = engine.llm.llm_engine.engine_core.engine_core
        core.early_exit_more = True  # what nobody has listed is found
        more = changed(engine) - found
        core.scheduler.kv_cache_manager.another = 1  # so is an attribute of any name
        drafting = attributes_by_class(engine)
    new = {f"{kind}.{name}" for kind in drafting.keys() & plain.keys() for name in drafting[kind] - plain[kind]}
    report(f"changed on live objects: {', '.join(sorted(found))}; added: {', '.join(sorted(new))}")
    assert attributes(more) == {"early_exit_more"}
    assert {"CPUModelRunner.__class__"} <= found
    assert {"early_exit_lengths", "load_weights"} <= attributes(found)
    listed = attributes(CHANGES)
    assert attributes(found) <= listed
    assert {"EngineCore.early_exit_more", "KVCacheManager.another"} <= new
    vllms_own = {name for name in new if name.startswith("SpecDecodingProm.")}  # its counters of any method
    assert attributes(new - vllms_own) - {"early_exit_more", "another"} <= listed
