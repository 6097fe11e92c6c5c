"""Every name of vLLM that is replaced, and everything else that is changed on its objects while an engine lives, each
with its reason: data. How names are replaced is in compat.py.

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
        target="vllm.v1.worker.worker_base:WorkerWrapperBase.init_device",
        replacement=f"{_HERE}.hooks:patch_before_device",
        stage="config",
        reason="the worker's own patches must be in place before its model runner is built, and only if it needs them",
        unneeded_when="vLLM lets a plugin register a speculative method",
    ),
    Patch(
        target="vllm.sampling_params:SamplingParams.verify",
        replacement=f"{_HERE}.hooks:check_requests",
        stage="config",
        reason="a request's own draft settings are among its extra_args, which vLLM hands on unread",
        unneeded_when="vLLM lets a plugin check the extra_args of a request",
    ),
    Patch(
        target="vllm.sampling_params:SamplingParams._validate_spec_decode",
        replacement=f"{_HERE}.hooks:serve_min_p_and_logit_bias",
        stage="config",
        reason="it refuses min_p and logit_bias wherever tokens are drafted",
        unneeded_when="vLLM serves min_p and logit_bias with speculative decoding",
    ),
    Patch(
        target="vllm.v1.engine.async_llm:AsyncLLM._add_streaming_input_request",
        replacement=f"{_HERE}.hooks:answer_streamed_input",
        stage="config",
        reason="a session whose input streams in keeps other tokens of a turn in its context where drafts are accepted",
        unneeded_when="vLLM keeps the same tokens of a turn whether they were drafted or not",
    ),
    Patch(
        target="vllm.v1.executor.abstract:Executor.__init__",
        replacement=f"{_HERE}.hooks:patch_before_scheduler",
        stage="config",
        reason="the scheduler's own patches must be in place before it is made, and only if it needs them",
        unneeded_when="vLLM lets a plugin register a speculative method",
    ),
    Patch(
        target="vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        replacement=f"{_HERE}.hooks:show_drafting",
        stage="config",
        reason="a plugin's stat logger is made for every engine, and turns statistics on where a user turned them off",
        unneeded_when="vLLM asks a plugin's stat logger whether an engine needs it",
    ),
    Patch(
        target="vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        replacement=f"{_HERE}.observe.transport:send",
        stage="scheduler",
        reason="statistics go from the scheduler to the API server with fields of vLLM's alone",
        unneeded_when="vLLM takes statistics of a plugin from a worker to its stat loggers",
    ),
    Patch(
        target="vllm.v1.core.sched.scheduler:Scheduler.__init__",
        replacement=f"{_HERE}.v2.widths:with_planner",
        stage="scheduler",
        reason="what changes on a live engine must reach the scheduler also before its first step",
        unneeded_when="vLLM lets a plugin say before each step how many drafts to plan",
    ),
    Patch(
        target="vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule",
        replacement=f"{_HERE}.v2.widths:plan_drafts",
        stage="scheduler",
        reason="it plans as many drafts for each request as for the longest possible, by the batch size alone",
        unneeded_when="vLLM lets a plugin say before each step how many drafts to plan",
    ),
    Patch(
        target="vllm.v1.core.sched.scheduler:Scheduler.make_spec_decoding_stats",
        replacement=f"{_HERE}.v2.widths:hear_verdicts",
        stage="scheduler",
        reason="whether drafts pay is known by what was accepted, which the scheduler learns here",
        unneeded_when="vLLM lets a plugin hear how many drafts of a request were accepted",
    ),
    Patch(
        target="vllm.v1.engine.core:EngineCore.step_with_batch_queue",
        replacement=f"{_HERE}.v2.step_order:read_before_launching",
        stage="scheduler",
        reason="it launches a step before it reads the last one's tokens, also where drafting would hide the reading",
        unneeded_when="vLLM reads first where a drafter keeps the device busy behind the sampling",
    ),
    Patch(
        target="vllm.v1.worker.gpu_worker:Worker.sample_tokens",
        replacement=f"{_HERE}.observe.transport:attach",
        stage="worker",
        reason="a drafter cannot put what it counts into the output of a step",
        unneeded_when="vLLM takes statistics of a plugin from a worker to its stat loggers",
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:ModelCudaGraphManager",
        replacement=f"{_HERE}.v2.graphs:with_every_width",
        stage="worker",
        reason="it captures decode graphs for steps with k drafts a request, and for none with fewer or without",
        unneeded_when="the V2 runner takes the widths of its decode graphs from its speculator",
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.add_requests",
        replacement=f"{_HERE}.v2.requests:tell_speculator",
        stage="worker",
        reason="it tells a V2 speculator of no new requests, and the graphs' manager of no lengths of queries",
        unneeded_when="the V2 runner tells its speculator of new requests, and graphs are chosen by the longest query",
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
        replacement=f"{_HERE}.v2.drafting_disabled:leave_out_drafting",
        stage="worker",
        reason="it hands steps to the speculator in which nothing is drafted, at the cost of five small kernels",
        unneeded_when="the V2 runner leaves its speculator out of steps without drafts",
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
        target="vllm.v1.worker.gpu.model_runner:RejectionSampler",
        replacement=f"{_HERE}.v2.verdict:with_short_drafts",
        stage="worker",
        reason="the V2 runner verifies k places of every request, and takes what stands there for a draft",
        unneeded_when="a V2 speculator can say on the device how many tokens a request drafted",
    ),
    Patch(
        target="vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler._verify_in_chunks",
        replacement=f"{_HERE}.v2.chosen_tokens:with_chosen_tokens",
        stage="worker",
        reason="it leaves logprob_token_ids out of steps with drafts",
        unneeded_when="the V2 runner gives chosen tokens their log-probabilities where it verifies drafts",
    ),
    Patch(
        target="vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        replacement=f"{_HERE}.v1.sampling:expand_on_cpu",
        stage="worker",
        reason="on the CPU it loses the temperatures of drafted positions: sampling with speculation is not lossless",
        unneeded_when="vLLM's CPU kernel writes to the tensor that it was given",
    ),
    Patch(
        target="vllm.v1.sample.rejection_sampler:RejectionSampler.forward",
        replacement=f"{_HERE}.v1.sampling:without_drafts",
        stage="worker",
        reason="a step without drafts ends the engine where a request has top_k alone, as do logprob_token_ids",
        unneeded_when="the V1 runner samples steps without drafts as without speculation, and chosen tokens with it",
    ),
    Patch(
        target="vllm.v1.sample.sampler:Sampler.forward",
        replacement=f"{_HERE}.v1.sampling:chosen_tokens_beside_others",
        stage="worker",
        reason="with logprob_token_ids in one request the others of a step get no log-probabilities",
        unneeded_when="the V1 runner gives each request of a step the log-probabilities that it asked for",
    ),
    Patch(
        target="vllm.v1.sample.sampler:Sampler.apply_logits_processors",
        replacement=f"{_HERE}.v1.sampling:bonus_token_after_drafts",
        stage="worker",
        reason="it forbids stop tokens behind drafts that reach min_tokens, so that a request may pass over one",
        unneeded_when="the V1 runner's min_tokens counts the drafts before a bonus token",
    ),
    Patch(
        target="vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder",
        replacement=f"{_HERE}.v1.thinking:exact_with_drafts",
        stage="worker",
        reason="it forces the ends of thinking in the rows of other requests in a step without drafts, and does not "
        "see thinking end inside drafts",
        unneeded_when="the V1 runner's thinking budgets count the drafts before each place of a round",
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:build_logitsprocs",
        replacement=f"{_HERE}.v1.processors:build_all",
        stage="worker",
        reason="it leaves out min_p, logit_bias and custom logits processors where tokens are drafted",
        unneeded_when="the V1 runner verifies drafts with every logits processor",
    ),
    Patch(
        target="vllm.v1.sample.rejection_sampler:RejectionSampler.apply_logits_processors",
        replacement=f"{_HERE}.v1.processors:bias_drafts",
        stage="worker",
        reason="it verifies drafts without logit_bias",
        unneeded_when="the V1 runner verifies drafts with every logits processor",
    ),
    Patch(
        target="vllm.v1.sample.rejection_sampler:apply_sampling_constraints",
        replacement=f"{_HERE}.v1.processors:leave_out_unlikely",
        stage="worker",
        reason="it verifies drafts without min_p",
        unneeded_when="the V1 runner verifies drafts with every logits processor",
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
        replacement=f"{_HERE}.v1.sampling:keep_seeds_of_prompts",
        stage="worker",
        reason="it rewinds the generator of a request whose prompt is computed in pieces, which one of a CPU cannot",
        unneeded_when="the V1 runner samples with generators of a CPU where prompts are computed in pieces",
    ),
    *(
        Patch(
            target=f"vllm.v1.worker.gpu_worker:Worker.{name}",
            replacement=f"{_HERE}.weights.renewed:after_new_weights",
            stage="worker",
            reason="weights that are replaced in a live engine leave copies of the old ones with the draft",
            unneeded_when="vLLM tells a drafter that its target has new weights",
        )
        for name in ("reload_weights", "finish_weight_update")
    ),
    Patch(
        target="vllm.v1.worker.gpu_worker:Worker.sleep",
        replacement=f"{_HERE}.weights.renewed:keep_weights_asleep",
        stage="worker",
        reason="sleep at level 2 drops tensors of the draft that no new weights bring back",
        unneeded_when="vLLM keeps a drafter's tensors that are no weights at level 2",
    ),
    Patch(
        target="vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
        replacement=f"{_HERE}.loaded_model:after_loading",
        stage="worker",
        reason="method `skip` cuts the target itself, and fitting reads its hidden states: both need the loaded model",
        unneeded_when="vLLM offers a hook between loading a model and its first forward pass",
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
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

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
    Change(f"{_SCHEDULER}.early_exit_planner", "v2.widths", "a scheduler has one planner of widths"),
    Change(f"{_SCHEDULER}.dynamic_sd_lookup", "v2.widths", "vLLM's list of draft lengths, for each step"),
    Change(f"{_SCHEDULER}.has_requests", "v2.step_order", "for one call: tokens are read, nothing is scheduled"),
    Change("vllm.v1.engine.core:EngineCore.early_exit_reader", "v2.step_order", "an engine has one order of steps"),
    Change(f"{_GPU}.states:RequestState.early_exit_lengths", "v2.verdict", "the sampler must know what was drafted"),
    Change(f"{_GPU}.states:RequestState.all_token_ids", "v2.speculator", "prompt look-up reads it there", "cuda"),
    Change(f"{_GPU}.model_runner:GPUModelRunner.speculator", "v2.drafting_disabled", "None for a step without drafts"),
    Change(f"{_GPU}.model_runner:GPUModelRunner.num_speculative_steps", "v2.drafting_disabled", "0 for that call"),
    Change(f"{_GPU}.cudagraph_utils:ModelCudaGraphManager.step", "v2.requests", "the longest query chooses a graph"),
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
    Change("vllm.v1.worker.gpu_worker:Worker.early_exit_warned_of_nan", "observe.transport", "a warning is said once"),
    Change("vllm.v1.metrics.loggers:StatLoggerManager.stat_loggers", "observe.metrics", "one logger more"),
    Change("torch.nn:Module.load_weights", "weights.renewed", "new weights make copies of the old ones stale"),
    Change("torch.nn:Module.compute_logits", "loaded_model", "the model ends after E layers", "skip"),
    Change("torch.nn:Module.early_exit_tap", "fitting.collect", "hidden states are collected", "fit"),
    Change(
        "vllm:*",
        "observe.annotate, observe.watch",
        "methods in named ranges, or counted, until the command ends",
        "profile",
    ),
)
"""What patches and vLLM's own arguments leave open. tests/engine/v2/test_v2_boundary.py compares live engines."""
