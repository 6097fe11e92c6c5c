"""Every name of vLLM that the plugin imports, and the module that the oldest supported release has it in.

The plugin imports these names from here and nowhere else, so that a name that moves is looked up in one place, and the
contract tests read from here what has to be there. Nothing of vLLM is imported before a name is
asked for. Names that are replaced are in patches.py; names of modules that are only compared, or looked up in
`sys.modules`, stay where they are used (worker.WORKERS, described.RUNNERS).
"""

from __future__ import annotations

import importlib
from typing import Any

MODULES = {
    # The engine's configuration, and both runners.
    "vllm": "_custom_ops envs",
    "vllm.config": "CompilationConfig ModelConfig ParallelConfig SpeculativeConfig VllmConfig set_current_vllm_config",
    "vllm.config.compilation": "CompilationMode CUDAGraphMode",
    "vllm.distributed": "tensor_model_parallel_all_gather",
    "vllm.distributed.device_communicators.pynccl": "PyNcclCommunicator",
    "vllm.distributed.parallel_state": "get_tp_group graph_capture",
    "vllm.engine.arg_utils": "EngineArgs",
    "vllm.exceptions": "VLLMValidationError",
    "vllm.forward_context": "BatchDescriptor get_forward_context set_forward_context",
    "vllm.logger": "init_logger",
    "vllm.platforms": "current_platform",
    "vllm.third_party": "pynvml",
    "vllm.triton_utils": "HAS_TRITON dispatcher",
    "vllm.triton_utils.dispatcher": "KernelOverride",
    "vllm.utils.torch_utils": "HAS_OPAQUE_TYPE",
    "vllm.v1.attention.backend": "AttentionCGSupport CommonAttentionMetadata",
    "vllm.v1.core.sched.async_scheduler": "AsyncScheduler",
    "vllm.v1.core.sched.scheduler": "Scheduler",
    "vllm.v1.engine.output_processor": "OutputProcessor",
    "vllm.v1.kv_cache_interface": "FullAttentionSpec KVCacheConfig",
    "vllm.v1.worker.utils": "AttentionGroup",
    # Metrics.
    "vllm.v1.metrics.loggers": "AggregateStatLoggerBase PrometheusStatLogger StatLoggerManager",
    "vllm.v1.metrics.stats": "IterationStats MultiModalCacheStats SchedulerStats",
    "vllm.v1.metrics.utils": "create_metric_per_engine",
    # The V1 model runner, which is the CPU's.
    "vllm.v1.sample.logits_processor": "AdapterLogitsProcessor BatchUpdate",
    "vllm.v1.sample.logits_processor.builtin": "MinTokensLogitsProcessor process_dict_updates",
    "vllm.v1.sample.logits_processor.state": "LogitsProcessors",
    "vllm.v1.sample.metadata": "SamplingMetadata",
    "vllm.v1.sample.ops.topk_topp_sampler": "apply_top_k_top_p",
    "vllm.v1.spec_decode.draft_model": "DraftModelProposer",
    "vllm.v1.outputs": "LogprobsTensors SamplerOutput",
    "vllm.v1.spec_decode.metadata": "SpecDecodeMetadata",
    # The V2 model runner, which is CUDA's.
    "vllm.v1.worker.gpu.attn_utils": "build_attn_metadata build_slot_mappings_by_layer get_attn_cg_support "
    "init_attn_backend",
    "vllm.v1.worker.gpu.block_table": "BlockTables",
    "vllm.v1.worker.gpu.cudagraph_utils": "BatchExecutionDescriptor ModelCudaGraphManager",
    "vllm.v1.worker.gpu.dp_utils": "dispatch_cg_and_sync_dp",
    "vllm.v1.worker.gpu.input_batch": "InputBatch InputBuffers",
    "vllm.v1.worker.gpu.model_states.interface": "ModelState",
    "vllm.v1.worker.gpu.sample.gumbel": "gumbel_sample",
    "vllm.v1.worker.gpu.sample.logprob": "compute_topk_scores",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler": "RejectionSampler",
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils": "SpeculatorBatchDescriptor "
    "SpeculatorCudaGraphManager",
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator": "TargetDependentARSpeculator",
    "vllm.v1.worker.gpu.states": "RequestState",
    # Layers, and kernels for copies of their weights.
    "vllm.lora.layers": "BaseLayerWithLoRA",
    "vllm.model_executor.kernels.linear.zentorch_utils": "is_zentorch_moe_supported",
    "vllm.model_executor.layers.activation": "SiluAndMul",
    "vllm.model_executor.layers.attention": "Attention",
    "vllm.model_executor.layers.attention.attention": "get_attention_context",
    "vllm.model_executor.layers.fused_moe": "MoERunner",
    "vllm.model_executor.layers.fused_moe.config": "fp8_w8a8_moe_quant_config",
    "vllm.model_executor.layers.fused_moe.experts.triton_moe": "TritonExperts TritonWNA16Experts",
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base": "FusedMoEMethodBase",
    "vllm.model_executor.layers.fused_moe.oracle.fp8": "Fp8MoeBackend make_fp8_moe_kernel",
    "vllm.model_executor.layers.fused_moe.oracle.int_wna16": "WNA16MoEBackend make_wna16_moe_kernel "
    "make_wna16_moe_quant_config",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": "UnquantizedFusedMoEMethod",
    "vllm.model_executor.layers.linear": "LinearBase UnquantizedLinearMethod",
    "vllm.model_executor.layers.logits_processor": "LogitsProcessor",
    "vllm.model_executor.layers.utils": "default_unquantized_gemm dispatch_unquantized_gemm",
    "vllm.model_executor.layers.vocab_parallel_embedding": "ParallelLMHead",
    # Compilation.
    "vllm.compilation.passes.inductor_pass": "CallableInductorPass InductorPass",
    "vllm.compilation.wrapper": "TorchCompileWithNoGuardsWrapper",
}
"""Module -> names, separated by spaces."""

PLACES = {name: f"{module}:{name}" for module, names in MODULES.items() for name in names.split()}
"""Name -> "module:name"."""


def __getattr__(name: str) -> Any:
    """`from selfspec_cli.vllm_plugin.vllm_names import NAME`: vLLM's object."""
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = PLACES[name].partition(":")[0]
    owner = importlib.import_module(module)
    return getattr(owner, name) if hasattr(owner, name) else importlib.import_module(f"{module}.{name}")
