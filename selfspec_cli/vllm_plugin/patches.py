"""Every name of vLLM that is replaced, and everything else that is changed on its objects while an engine lives, each
with its reason: data. How names are replaced is in compat.py; what can be a subclass is one (subclasses.py).

Patches of the stage "config" act in every process (hooks.py); those of the stages "scheduler" and "worker" are applied
when an engine starts whose configuration carries our settings, so a vLLM that does not use them runs as it was shipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stage = Literal["config", "scheduler", "worker"]


@dataclass(frozen=True)
class Patch:
    """One replaced name.

    target: "module:attribute.path" in vLLM. replacement: "module:function" here; it gets the original and returns
    what takes its place. unneeded_when: what vLLM would have to offer for this patch to go.
    """

    target: str
    replacement: str
    stage: Stage
    reason: str
    unneeded_when: str


_HERE = "selfspec_cli.vllm_plugin"

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        replacement=f"{_HERE}.hooks:early_exit_on_request",
        stage="config",
        reason="SpeculativeConfig checks `method` against a fixed list and refuses unknown keys",
        unneeded_when="vLLM lets a plugin register a speculative method",
    ),
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
        replacement=f"{_HERE}.hooks:offer_methods",
        stage="config",
        reason="the option --spec-method takes the words of a fixed list",
        unneeded_when="vLLM lets a plugin register a speculative method",
    ),
    Patch(
        target="vllm.config.vllm:VllmConfig._set_cudagraph_sizes",
        replacement=f"{_HERE}.hooks:capture_every_width",
        stage="config",
        reason="it captures no graphs for steps of more than 512 tokens, and 5 tokens a request are soon more; and a "
        "plain engine's sizes, which are in its key of the compile cache, are known here alone",
        unneeded_when="vLLM's limit counts requests where tokens are drafted, and its compile cache has no sizes of "
        "graphs in its keys",
    ),
    Patch(
        target="vllm.sampling_params:SamplingParams.verify",
        replacement=f"{_HERE}.hooks:check_requests",
        stage="config",
        reason="a request's own draft settings are among its extra_args, which vLLM hands on unread; and min_p and "
        "logit_bias are refused wherever tokens are drafted",
        unneeded_when="vLLM lets a plugin check extra_args, and serves min_p and logit_bias with speculative decoding",
    ),
    Patch(
        target="vllm.v1.engine.async_llm:AsyncLLM.add_request",
        replacement=f"{_HERE}.hooks:answer_streamed_input",
        stage="config",
        reason="a session whose input streams in keeps other tokens of a turn in its context where drafts are accepted",
        unneeded_when="vLLM keeps the same tokens of a turn whether they were drafted or not",
    ),
    Patch(
        target="vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        replacement=f"{_HERE}.hooks:show_drafting",
        stage="config",
        reason="a plugin's stat logger is made for every engine, and turns statistics on where a user turned them off",
        unneeded_when="vLLM asks a plugin's stat logger whether an engine needs it",
    ),
    Patch(
        target="vllm.v1.engine.core:EngineCore.step_with_batch_queue",
        replacement=f"{_HERE}.v2.step_order:read_before_launching",
        stage="scheduler",
        reason="it launches a step before it reads the last one's tokens, also where drafting would hide the reading",
        unneeded_when="vLLM reads first where a drafter keeps the device busy behind the sampling",
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:ModelCudaGraphManager",
        replacement=f"{_HERE}.v2.graphs:with_every_width",
        stage="worker",
        reason="it captures decode graphs for steps with k drafts a request, and for none with fewer or without",
        unneeded_when="the V2 runner takes the widths of its decode graphs from its speculator",
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:DraftModelProposer",
        replacement=f"{_HERE}.v1.proposer:with_early_exit",
        stage="worker",
        reason="the V1 runner names its proposer classes; `custom_class` proposers see no KV cache and no block table",
        unneeded_when="the V1 runner takes its proposer from a registry",
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:init_speculator",
        replacement=f"{_HERE}.v2.speculator:init_with_early_exit",
        stage="worker",
        reason="the V2 runner picks its speculator by the method's name",
        unneeded_when="the V2 runner takes its speculator from a registry",
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:build_logitsprocs",
        replacement=f"{_HERE}.v1.processors:build_all",
        stage="worker",
        reason="it leaves out min_p, logit_bias and custom logits processors where tokens are drafted",
        unneeded_when="the V1 runner verifies drafts with every logits processor",
    ),
    Patch(
        target="vllm.v1.sample.rejection_sampler:apply_sampling_constraints",
        replacement=f"{_HERE}.v1.processors:constrain_drafts",
        stage="worker",
        reason="on a CPU it verifies drafts without their request's temperature, top_k and top_p",
        unneeded_when="the V1 runner verifies drafts with the parameters of their request on a CPU too",
    ),
)


@dataclass(frozen=True)
class Change:
    """What a live object of vLLM's has otherwise than in a plain engine.

    target: "module:Class.attribute"; "__class__" where its type is another. where: our module that does it. on: what it
    takes: an engine that drafts ("drafting"), one on a GPU ("cuda"), or a command ("profile", "skip", "fit").
    """

    target: str
    where: str
    reason: str
    on: str = "drafting"


_GPU = "vllm.v1.worker.gpu"

CHANGES: tuple[Change, ...] = (
    Change(
        "vllm.config:SpeculativeConfig.__class__",
        "spec_config",
        "a name in the log and a key of its own for what vLLM keeps by the configuration",
    ),
    Change("vllm.config:SpeculativeConfig.selfspec", "spec_config", "settings travel to the workers with it"),
    Change(
        "vllm.config:SpeculativeConfig.selfspec_plain_sizes",
        "compile_cache",
        "the key of a plain engine's compiled code needs its sizes of graphs",
        "cuda",
    ),
    Change("vllm.config:ParallelConfig.worker_extension_cls", "spec_config", "vLLM's way to give a worker methods"),
    Change("vllm.config:ParallelConfig.worker_cls", "overrides", "vLLM's way to name a worker"),
    Change("vllm.engine.arg_utils:EngineArgs.scheduler_cls", "overrides", "vLLM's way to name a scheduler"),
    Change(
        f"{_GPU}.model_runner:GPUModelRunner.__class__",
        "subclasses",
        "a subclass of what the worker made, of either model runner: vLLM has no way to name one",
    ),
    Change("vllm.v1.engine.core:EngineCore.early_exit_reader", "v2.step_order", "an engine has one order of steps"),
    Change(f"{_GPU}.states:RequestState.early_exit_lengths", "v2.sampler", "the sampler must know what was drafted"),
    Change(
        f"{_GPU}.buffer_utils:StagedWriteTensor.gpu",
        "v2.draft_loop",
        "prompt lookup reads the tokens of all requests in the device's memory",
        "cuda",
    ),
    Change(
        f"{_GPU}.spec_decode.target_dependent_ar.cudagraph_utils:SpeculatorCudaGraphManager._capture_descs",
        "v2.draft_loop",
        "a graph for each draft length, where a loop cannot end on the device",
        "cuda",
    ),
    Change(
        "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator.all_gather",
        "v2.ranks",
        "while a loop is captured: its exchange must be a kernel",
        "cuda",
    ),
    Change("vllm.v1.outputs:ModelRunnerOutput.early_exit_totals", "observe.transport", "counts travel with a step"),
    Change("vllm.v1.metrics.loggers:StatLoggerManager.stat_loggers", "observe.metrics", "one logger more"),
    Change("torch.nn:Module.load_weights", "weights.renewed", "new weights make copies of the old ones stale"),
    Change("torch.nn:Module.compute_logits", "loaded_model", "the model ends after E layers", "skip"),
    Change("torch.nn:Module.early_exit_tap", "fitting.collect", "hidden states are collected", "fit"),
    Change(
        "vllm:*",
        "observe.profiler, observe.watch",
        "methods in named ranges, or counted, until the command ends",
        "profile",
    ),
)
"""What patches, and attributes of our own subclasses (subclasses.py), leave open. tests/engine/v2/test_v2_boundary.py
compares live engines."""
