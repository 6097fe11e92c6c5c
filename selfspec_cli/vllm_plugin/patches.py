"""Every name of vLLM that is replaced, and everything else that is changed on its objects while an engine lives, each
with its reason. What can be a subclass is one (subclasses.py); compat.py puts the patches in place.

Patches of the stage "config" act in every process (hooks.py); those of the stages "scheduler" and "worker" are applied
when an engine starts whose configuration carries our settings, so a vLLM that does not use them runs as it was shipped.
A patch replaces a name that is there: a target that cannot be found is an error, never an addition. Applying twice
changes nothing, and a stage is applied as a whole or not at all."""

from dataclasses import dataclass
from typing import Literal

Stage = Literal["config", "scheduler", "worker"]


@dataclass(frozen=True)
class Patch:
    """One replaced name. target: "module:attribute.path" in vLLM. replacement: "module:function" here; it gets the
    original and returns what takes its place. docs/how_it_works.md says what would make a patch unnecessary."""

    target: str
    replacement: str
    stage: Stage
    reason: str


_HERE = "selfspec_cli.vllm_plugin"

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        replacement=f"{_HERE}.hooks:early_exit_on_request",
        stage="config",
        reason="SpeculativeConfig checks `method` against a fixed list and refuses unknown keys",
    ),
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
        replacement=f"{_HERE}.hooks:offer_methods",
        stage="config",
        reason="the option --spec-method takes the words of a fixed list",
    ),
    Patch(
        target="vllm.config.vllm:VllmConfig._set_cudagraph_sizes",
        replacement=f"{_HERE}.hooks:capture_every_width",
        stage="config",
        reason="it captures no graphs for steps of more than 512 tokens, and 5 tokens a request are soon more; and a "
        "plain engine's sizes, which are in its key of the compile cache, are known here alone",
    ),
    Patch(
        target="vllm.sampling_params:SamplingParams.verify",
        replacement=f"{_HERE}.hooks:check_requests",
        stage="config",
        reason="a request's own draft settings are among its extra_args, which vLLM hands on unread; and min_p and "
        "logit_bias are refused wherever tokens are drafted",
    ),
    Patch(
        target="vllm.v1.engine.async_llm:AsyncLLM.add_request",
        replacement=f"{_HERE}.hooks:answer_streamed_input",
        stage="config",
        reason="a session whose input streams in keeps other tokens of a turn in its context where drafts are accepted",
    ),
    Patch(
        target="vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        replacement=f"{_HERE}.hooks:show_drafting",
        stage="config",
        reason="a plugin's stat logger is made for every engine, and turns statistics on where a user turned them off",
    ),
    Patch(
        target="vllm.v1.engine.core:EngineCore.step_with_batch_queue",
        replacement=f"{_HERE}.v2.step_order:read_before_launching",
        stage="scheduler",
        reason="it launches a step before it reads the last one's tokens, also where drafting would hide the reading",
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:ModelCudaGraphManager",
        replacement=f"{_HERE}.v2.graphs:with_every_width",
        stage="worker",
        reason="it captures decode graphs for steps with k drafts a request, and for none with fewer or without",
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:DraftModelProposer",
        replacement=f"{_HERE}.v1.proposer:with_early_exit",
        stage="worker",
        reason="the V1 runner names its proposer classes; `custom_class` proposers see no KV cache and no block table",
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:init_speculator",
        replacement=f"{_HERE}.v2.speculator:init_with_early_exit",
        stage="worker",
        reason="the V2 runner picks its speculator by the method's name",
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:build_logitsprocs",
        replacement=f"{_HERE}.v1.sampling:build_all",
        stage="worker",
        reason="it leaves out min_p, logit_bias and custom logits processors where tokens are drafted",
    ),
    Patch(
        target="vllm.v1.sample.rejection_sampler:apply_sampling_constraints",
        replacement=f"{_HERE}.v1.sampling:constrain_drafts",
        stage="worker",
        reason="on a CPU it verifies drafts without their request's temperature, top_k and top_p",
    ),
)


_GPU = "vllm.v1.worker.gpu"

CHANGES = {
    "vllm.config:SpeculativeConfig.__class__": "spec_config.py: a name in the log, and a key of its own for what vLLM "
    "keeps by the configuration",
    "vllm.config:SpeculativeConfig.selfspec": "spec_config.py: settings travel to the workers with it",
    "vllm.config:SpeculativeConfig.selfspec_plain_sizes": "compile_cache.py, on a GPU: the key of a plain engine's "
    "compiled code needs its sizes of graphs",
    "vllm.config:ParallelConfig.worker_extension_cls": "spec_config.py: vLLM's way to give a worker methods",
    "vllm.config:ParallelConfig.worker_cls": "overrides.py: vLLM's way to name a worker",
    "vllm.engine.arg_utils:EngineArgs.scheduler_cls": "overrides.py: vLLM's way to name a scheduler",
    f"{_GPU}.model_runner:GPUModelRunner.__class__": "subclasses.py: a subclass of what the worker made, of either "
    "model runner, which vLLM has no way to name",
    "vllm.v1.engine.core:EngineCore.early_exit_reader": "v2/step_order.py: an engine has one order of steps",
    f"{_GPU}.states:RequestState.early_exit_lengths": "v2/runner.py: the sampler must know what was drafted",
    f"{_GPU}.buffer_utils:StagedWriteTensor.gpu": "v2/draft_loop.py, on a GPU: prompt lookup reads the tokens of all "
    "requests in the device's memory",
    f"{_GPU}.spec_decode.target_dependent_ar.cudagraph_utils:SpeculatorCudaGraphManager._capture_descs": ""
    "v2/draft_loop.py, on a GPU: a graph for each draft length, where a loop cannot end on the device",
    "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator.all_gather": "v2/device_loop.py, on "
    "GPUs: while a loop is captured its exchange must be a kernel",
    "vllm.v1.outputs:ModelRunnerOutput.early_exit_totals": "observe/transport.py: counts travel with a step",
    "vllm.v1.metrics.loggers:StatLoggerManager.stat_loggers": "observe/metrics.py: one logger more",
    "torch.nn:Module.load_weights": "weights/copied.py: new weights make copies of the old ones stale",
    "torch.nn:Module.compute_logits": "trunk.py, for method `skip`: the model ends after E layers",
    "torch.nn:Module.early_exit_tap": "fitting.py, to fit heads: hidden states are collected",
    "vllm:*": "observe/profiler.py, observe/watch.py: methods in named ranges, or counted, until a command ends",
}
"""What a live object of vLLM's has otherwise than in a plain engine, and is neither a patch nor an attribute of our own
subclasses: "module:Class.attribute" ("__class__" where its type is another) -> our module, and why.
tests/engine/v2/test_v2_boundary.py compares live engines."""
