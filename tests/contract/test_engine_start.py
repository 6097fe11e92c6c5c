"""How an engine on CUDA comes to our subclasses, read from the source of each supported release.

Which worker and which scheduler vLLM takes, when it makes a model runner, and that nothing keeps a method of the runner
before the runner is given its class. No test here has a GPU.
"""

import ast
import inspect
from types import SimpleNamespace

import pytest
from vllm_source import VARIABLE, Source, folder_of, sources

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.vllm_plugin import overrides, subclasses, versions
from selfspec_cli.vllm_plugin.releases.seams import V1_RUNNER, V2_FOLDER, V2_RUNNER, WORKER

pytestmark = pytest.mark.contract

CONFIG, EXECUTOR = "vllm.config", "vllm.v1.executor"


@pytest.fixture(scope="module", params=[each.release for each in versions.SUPPORTED])
def vllm(request) -> Source:
    folder = folder_of(request.param)
    if folder is None:
        pytest.skip(f"vLLM {request.param} is neither installed nor under {sources()} (${VARIABLE})")
    return Source(folder)


def in_order(text: str, *parts: str) -> bool:
    places = [text.index(part) for part in parts]
    return places == sorted(places)


def read_on_self(source: Source, target: str, names: set[str]) -> set[str]:
    """Of these names, those that a class reads on self other than to call them at once."""
    kept = set()
    for kind in source.classes(target):
        called = {id(node.func) for node in ast.walk(kind) if isinstance(node, ast.Call)}
        for node in ast.walk(kind):
            if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "self":
                kept |= set() if id(node) in called else {node.attr}
    return kept


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


def test_every_executor_makes_a_worker_by_its_name_and_then_its_device_and_its_model(vllm):
    wrapper = "vllm.v1.worker.worker_base:WorkerWrapperBase"
    made = vllm.segment(f"{wrapper}.init_worker")
    by_name = "resolve_obj_by_qualname(parallel_config.worker_cls)"
    assert in_order(made, "load_general_plugins()", by_name, "self.worker = worker_class(")
    assert "self.worker.init_device()" in vllm.segment(f"{wrapper}.init_device")
    for made in ("uniproc_executor:UniProcExecutor._init_executor", "multiproc_executor:WorkerProc.__init__"):
        assert in_order(vllm.segment(f"{EXECUTOR}.{made}"), ".init_worker(", ".init_device()", ".load_model()")
    ray = vllm.text(f"{EXECUTOR}.ray_executor_v2")
    assert "WorkerProc)" in ray or "WorkerWrapperBase" in ray


def test_tokens_are_asked_of_the_model_runner_and_by_rays_first_executor_not_of_the_worker(vllm):
    """So what drafting counted is laid on a model runner's output (observe/transport.py)."""
    for kind in ("gpu_worker:Worker", "cpu_worker:CPUWorker"):
        asked = vllm.segment(f"vllm.v1.worker.{kind}.sample_tokens")
        assert "self.model_runner.sample_tokens(grammar_output)" in asked
    if vllm.file(f"{EXECUTOR}.ray_executor") is not None:  # gone in 0.33
        ray = vllm.text(f"{EXECUTOR}.ray_utils")
        assert "class RayWorkerWrapper(WorkerWrapperBase)" in ray
        assert "self.worker.model_runner.sample_tokens(grammar_output)" in ray
    for methods in (subclasses._of_v1_runner(), subclasses._of_v2_runner()):
        assert "sample_tokens" in methods


def test_a_gpus_worker_makes_its_runner_at_the_end_of_init_device(vllm):
    device = vllm.segment(f"{WORKER}.init_device")
    assert device.rstrip().endswith("self._init_workspace_and_model_runner()")
    assert "self.model_runner" not in device
    made = vllm.segment(f"{WORKER}._init_workspace_and_model_runner")
    after = made[made.index("self.model_runner") :]
    assert "self._make_model_runner()" in after.splitlines()[0] and after.count("self.model_runner") == 1
    init = vllm.segment(f"{WORKER}.__init__")
    assert "self.use_v2_model_runner = vllm_config.use_v2_model_runner" in init
    assert "self.model_runner" not in init


@pytest.mark.parametrize("v2", [True, False])
def test_nothing_keeps_a_method_of_a_runner_that_its_subclass_overrides(vllm, v2):
    runner = f"{V2_RUNNER if v2 else V1_RUNNER}:GPUModelRunner"
    names = set(subclasses._of_v2_runner() if v2 else subclasses._of_v1_runner())
    assert names <= vllm.attributes(runner)
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
    made = vllm.segment(f"{V2_RUNNER}:GPUModelRunner.load_model")
    assert made.count("self.rejection_sampler = RejectionSampler(") == 1


def test_a_speculator_and_graphs_are_made_by_names_that_were_replaced_before_the_runner(vllm):
    """Patches of the stage "worker" are applied before vLLM's `init_device`, in which the runner looks names up."""
    order = inspect.getsource(subclasses._with_runner)
    assert in_order(order, 'compat.apply("worker")', "original(self)", "adopt(")
    init = vllm.segment(f"{V2_RUNNER}:GPUModelRunner.__init__")
    assert "init_speculator(" in init
    cache = vllm.segment(f"{V2_RUNNER}:GPUModelRunner.initialize_kv_cache")
    assert "ModelCudaGraphManager(" in cache


def test_an_engine_core_makes_the_scheduler_by_keyword_and_then_chooses_how_to_step(vllm):
    made = vllm.segment("vllm.v1.engine.core:EngineCore.__init__")
    assert in_order(made, ".get_scheduler_cls()", "Scheduler(vllm_config=vllm_config", "self.step_fn = ")
    classes = [node for node in ast.walk(ast.parse(made)) if isinstance(node, ast.Name) and node.id == "Scheduler"]
    assert len(classes) == 2, "it is called and nothing else, so that a function can stand there"
    chosen = vllm.segment(f"{CONFIG}.scheduler:SchedulerConfig.get_scheduler_cls")
    assert in_order(chosen, "self.async_scheduling", "return AsyncScheduler", "return Scheduler")
    assert "resolve_obj_by_qualname(self.scheduler_cls)" in chosen
    default = inspect.getsource(subclasses.scheduler)
    assert "AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler" in default


def test_the_names_of_classes_are_in_no_key_of_compiled_code(vllm):
    assert "scheduler_cls" not in vllm.segment(f"{CONFIG}.scheduler:SchedulerConfig.compute_hash")
    ignored = vllm.segment(f"{CONFIG}.parallel:ParallelConfig.compute_hash")
    assert "'worker_cls'" in ignored and "'worker_extension_cls'" in ignored


def test_a_scheduler_is_only_asked_to_schedule_where_its_slots_are_handed_out(vllm):
    """`plan_drafts` changes what an asynchronous scheduler has just handed out; nothing reads it in between."""
    base = "vllm.v1.core.sched"
    planned = vllm.segment(f"{base}.scheduler:Scheduler.schedule").rstrip()
    assert planned.endswith("return scheduler_output")
    assert planned[planned.index("self._update_after_schedule(scheduler_output)") :].count("\n") == 1
    handed = vllm.segment(f"{base}.async_scheduler:AsyncScheduler._update_after_schedule")
    assert "[-1] * scheduler_output.num_spec_tokens_to_schedule" in handed
    assert "if request.is_prefill_chunk:\n            continue" in handed
    assert handed.count("request.spec_token_ids") == handed.count("scheduler_output.num_spec_tokens_to_schedule") == 1
    assert "num_spec_tokens_to_schedule" not in vllm.segment(f"{base}.scheduler:Scheduler._update_after_schedule")


def test_a_step_of_drafting_has_the_metadata_that_vllms_own_drafters_have(vllm):
    """`draft_loop._metadata` and `speculator._find_groups` do in public names what these do."""
    drafter = f"{V2_FOLDER}.spec_decode.speculator:DraftModelSpeculator"
    built = vllm.segment(f"{drafter}._build_attn_metadata")
    for part in (
        "num_reqs_padded = batch_desc.num_reqs or num_reqs",
        "batch_desc.num_tokens if batch_desc.cg_mode == CUDAGraphMode.FULL else int(query_start_loc_np[-1])",
        "query_start_loc_cpu[num_reqs:] = query_start_loc_cpu[num_reqs]",
        "slot_mappings = self.block_tables.slot_mappings[:, :num_tokens]",
        "torch.add(seq_lens_cpu_upper_bound[:num_reqs], step",
        ".clamp_(max=self.max_model_len)",
        "is_prefilling=self.draft_is_prefilling[:num_reqs_padded]",
        "positions=self.input_buffers.positions[:num_tokens]",
    ):
        assert part in built, part
    refreshed = vllm.segment(f"{drafter}._update_draft_decode_metadata")
    assert in_order(refreshed, "if self.block_tables.cp_size > 1", "group.update_draft_decode_metadata(attn_metadata)")
    assert "cp_size=self.dcp_size" in vllm.segment(f"{V2_RUNNER}:GPUModelRunner.initialize_kv_cache")
    able = vllm.segment(f"{drafter}._configure_decode_metadata_update")
    assert "if not attn_group.supports_draft_decode_metadata_update" in able
    copied = vllm.segment(f"{drafter}._copy_request_inputs")
    assert "self.idx_mapping.fill_(-1)" in copied and "self.idx_mapping[num_reqs:].fill_(-1)" in copied
