"""What the plugin relies on in vLLM, as data: signatures, fields and attributes, as the oldest supported release has
them. Names that are replaced are in patches.py, names that are imported in vllm_names.py.

Signatures are compared whole, not only for what we pass: a new parameter of a method that we override is a question to
answer, not a detail.
"""

from __future__ import annotations

from selfspec_cli.vllm_plugin.releases import Release

V1_PROPOSER = "vllm.v1.spec_decode.draft_model:DraftModelProposer"
V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_FOLDER = "vllm.v1.worker.gpu"
V2_SPECULATOR = f"{V2_FOLDER}.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator"
V2_GRAPHS = f"{V2_FOLDER}.spec_decode.target_dependent_ar.cudagraph_utils:SpeculatorCudaGraphManager"
V2_RUNNER = f"{V2_FOLDER}.model_runner"
MIN_TOKENS = "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
THINKING = "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder"
WORKER = "vllm.v1.worker.gpu_worker:Worker"
LINEAR = "vllm.model_executor.layers.linear"
MOE = "vllm.model_executor.layers.fused_moe"
ATTENTION = "vllm.model_executor.layers.attention.attention"
COMMUNICATORS = "vllm.distributed.device_communicators"
FLASH = "vllm.v1.attention.backends.flash_attn"

# Layers of a decoder, its embedding and its logits that hold adapters (weights/replace.py takes what they wrap).
LORA_LAYERS = (
    "ColumnParallelLinear",
    "MergedQKVParallelLinear",
    "RowParallelLinear",
    "ReplicatedLinear",
    "VocabParallelEmbedding",
    "LogitsProcessor",
)

# Target -> its parameters in 0.32.0, in order. self is not listed.
SIGNATURES = {
    # What patches.py lists: the replacement is called with these.
    "vllm.engine.arg_utils:EngineArgs.create_speculative_config": "target_model_config target_parallel_config",
    "vllm.config.vllm:VllmConfig._set_cudagraph_sizes": "",
    "vllm.triton_utils.dispatcher:register_kernels": "overrides",
    f"{V2_RUNNER}:init_speculator": "vllm_config device req_states",
    "vllm.sampling_params:SamplingParams.verify": "model_config speculative_config structured_outputs_config tokenizer",
    # What subclasses.py overrides, and what calls it.
    "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls": "",
    f"{SCHEDULER}.__init__": "vllm_config kv_cache_config structured_output_manager block_size hash_block_size "
    "mm_registry include_finished_set log_stats",
    f"{SCHEDULER}.make_spec_decoding_stats": "spec_decoding_stats num_draft_tokens num_accepted_tokens "
    "num_invalid_spec_tokens request_id",
    f"{SCHEDULER}.update_from_output": "scheduler_output model_runner_output",
    f"{SCHEDULER}.has_requests": "",
    "vllm.v1.engine.core:EngineCore.step_with_batch_queue": "",
    "vllm.v1.executor.uniproc_executor:AsyncOutputFuture.__init__": "async_output single_value",
    "vllm.v1.metrics.loggers:StatLoggerManager.__init__": "vllm_config engine_idxs custom_stat_loggers "
    "enable_default_loggers aggregate_engine_logging client_count",
    f"{WORKER}.init_device": "",
    "vllm.v1.worker.cpu_worker:CPUWorker.init_device": "",
    f"{WORKER}.sample_tokens": "grammar_output",
    f"{WORKER}.finish_weight_update": "",
    f"{WORKER}.sleep": "level",
    f"{V1_RUNNER}:GPUModelRunner.load_model": "load_dummy_weights model",
    f"{V1_RUNNER}:GPUModelRunner.initialize_kv_cache": "kv_cache_config is_profiling kv_cache_allocation_context",
    f"{V2_RUNNER}:GPUModelRunner.load_model": "load_dummy_weights args model kwargs",
    f"{V2_FOLDER}.sample.sampler:Sampler.apply_sampling_params": "logits expanded_idx_mapping idx_mapping "
    "idx_mapping_np pos input_ids expanded_local_pos seq_lens_upper_bound_np skip_top_k_top_p",
    "vllm.v1.engine.async_llm:AsyncLLM.add_request": "request_id prompt params arrival_time lora_request "
    "tokenization_kwargs trace_headers priority data_parallel_rank session_id prompt_text reasoning_ended "
    "reasoning_parser_kwargs kv_hints",
    "vllm.v1.sample.sampler:Sampler.forward": "logits sampling_metadata predict_bonus_token logprobs_mode_override",
    "vllm.v1.sample.rejection_sampler:apply_sampling_constraints": "logits cu_num_draft_tokens sampling_metadata",
    "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p": "logits k p",
    f"{THINKING}.__init__": "reasoning_config max_num_seqs num_spec_tokens device is_pin_memory",
    f"{THINKING}.has_tracked_requests": "",
    f"{THINKING}.sync_batch": "batch_update",
    f"{THINKING}.update_state": "output_token_ids spec_token_ids repeat_indices",
    f"{THINKING}.apply_to_logits": "logits predict_bonus_token spec_token_ids",
    f"{V2_RUNNER}:GPUModelRunner.add_requests": "scheduler_output",
    f"{V2_FOLDER}.spec_decode.utils:DraftTokensHandler.set_draft_tokens": "input_batch draft_tokens",
    f"{V2_FOLDER}.cudagraph_utils:ModelCudaGraphManager.__init__": "vllm_config device cudagraph_mode decode_query_len "
    "lora_capture_cases varlen_decode ubatch_runner",
    f"{V2_FOLDER}.cudagraph_utils:CudaGraphManager._init_candidates": "",
    f"{V2_FOLDER}.cudagraph_utils:CudaGraphManager.dispatch": "num_reqs num_tokens uniform_token_count "
    "num_active_loras max_query_len num_ubatches",
    f"{V2_FOLDER}.cudagraph_utils:ModelCudaGraphManager.capture": "model model_state input_buffers "
    "intermediate_tensors block_tables attn_groups kv_cache_config pcp_manager has_lora "
    "use_aux_hidden_state_outputs lora_capture_hook progress_bar_desc",
    f"{V2_FOLDER}.attn_utils:get_attn_cg_support": "attn_groups vllm_config checked_layer_names",
    f"{V2_FOLDER}.attn_utils:AttentionCGSupportInfo.narrow": "support backend",
    f"{V2_FOLDER}.model_states.interface:ModelState.get_additional_cg_support": "",
    "vllm.config:ModelConfig.get_num_attention_heads": "parallel_config arch_config",
    "vllm.config:ModelConfig.get_num_kv_heads": "parallel_config arch_config",
    # Metrics: overridden, and called.
    "vllm.v1.metrics.loggers:AggregateStatLoggerBase.__init__": "vllm_config engine_indexes",
    "vllm.v1.metrics.loggers:StatLoggerBase.record": "scheduler_stats iteration_stats mm_cache_stats engine_idx",
    "vllm.v1.metrics.loggers:StatLoggerBase.log_engine_initialized": "",
    "vllm.v1.metrics.loggers:StatLoggerManager.record": "scheduler_stats iteration_stats mm_cache_stats engine_idx",
    "vllm.v1.metrics.utils:create_metric_per_engine": "metric per_engine_labelvalues",
    # V1: overridden.
    f"{V1_PROPOSER}.__init__": "vllm_config device runner",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.__init__": "vllm_config device "
    "pass_hidden_states_to_model runner",
    f"{V1_PROPOSER}.load_model": "target_model",
    f"{V1_PROPOSER}.initialize_attn_backend": "kv_cache_config kernel_block_sizes",
    f"{V1_PROPOSER}.dummy_run": "num_tokens use_cudagraphs is_graph_capturing slot_mappings",
    f"{V1_PROPOSER}.prepare_next_token_ids_cpu": "sampled_token_ids requests gpu_input_batch num_scheduled_tokens",
    f"{V1_PROPOSER}.prepare_inputs": "common_attn_metadata sampled_token_ids num_draft_tokens",
    f"{V1_PROPOSER}.propose": "num_speculative_tokens target_token_ids target_positions target_hidden_states "
    "next_token_ids token_indices_to_sample common_attn_metadata sampling_metadata mm_embed_inputs "
    "num_rejected_tokens_gpu slot_mappings",
    f"{V1_PROPOSER}.take_last_draft_probs": "",
    # V1: called.
    "vllm.v1.sample.sampler:Sampler.gather_logprobs": "logprobs num_logprobs token_ids",
    "vllm.v1.sample.sampler:Sampler.gather_specific_token_logprobs": "logprobs logprob_token_ids sampled",
    "vllm.v1.worker.utils:AttentionGroup.get_metadata_builder": "ubatch_id",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build": "common_prefix_len common_attn_metadata fast_build",
    "vllm.v1.worker.block_table:BlockTable.get_device_tensor": "num_reqs",
    "vllm.v1.worker.block_table:MultiGroupBlockTable.__getitem__": "idx",
    # V2: overridden.
    f"{V2_SPECULATOR}.__init__": "vllm_config device",
    f"{V2_SPECULATOR}.load_model": "target_model",
    f"{V2_SPECULATOR}.load_draft_model": "target_model target_attn_layer_names",
    f"{V2_SPECULATOR}.set_attn": "model_state kv_cache_config block_tables target_input_buffers target_attn_groups",
    f"{V2_SPECULATOR}.init_cudagraph_manager": "cudagraph_mode",
    f"{V2_SPECULATOR}.capture": "",
    f"{V2_SPECULATOR}.propose": "input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states "
    "num_sampled num_rejected last_sampled next_prefill_tokens temperature seeds dp_sync_state dummy_run "
    "skip_attn_for_dummy_run mm_inputs is_profile num_speculative_tokens",
    f"{V2_SPECULATOR}.sample_draft": "hidden_states sample_src_positions idx_mapping temperature seeds draft_step "
    "draft_logits spec_step_idx",
    f"{V2_SPECULATOR}.compute_draft_logits": "hidden_states spec_step_idx",
    # V2: called.
    f"{V2_FOLDER}.spec_decode.rejection_sampler:RejectionSampler.__call__": "logits input_batch draft_logits "
    "invalid_drafts",
    f"{V2_GRAPHS}.specialize_spec_tokens": "desc num_speculative_tokens",
    f"{V2_GRAPHS}.__init__": "vllm_config device cudagraph_mode decode_query_len lora_capture_cases varlen_decode "
    "ubatch_runner",
    f"{V2_GRAPHS}.capture": "forward_fn model_state input_buffers block_tables attn_groups kv_cache_config "
    "progress_bar_desc specialize_spec_tokens",
    f"{V2_GRAPHS}.run_fullgraph": "desc",
    f"{V2_FOLDER}.dp_utils:dispatch_cg_and_sync_dp": "cudagraph_manager num_reqs num_tokens uniform_token_count "
    "dp_size dp_rank max_query_len need_eager num_active_loras parallel_config allow_ubatching uniform_decode "
    "dp_sync_state",
    f"{V2_FOLDER}.attn_utils:init_attn_backend": "kv_cache_config vllm_config device active_layer_names "
    "draft_layer_names",
    f"{V2_FOLDER}.attn_utils:build_attn_metadata": "attn_groups num_reqs num_tokens query_start_loc_gpu "
    "query_start_loc_cpu max_query_len seq_lens max_seq_len block_tables slot_mappings kv_cache_config "
    "seq_lens_cpu_upper_bound dcp_local_seq_lens dcp_local_seq_lens_cpu_upper_bound positions is_prefilling "
    "mm_req_doc_ranges model_specific_attn_metadata for_cudagraph_capture causal rswa_prefix_lens ubatch_idx "
    "fast_prefill req_idx",
    f"{V2_FOLDER}.attn_utils:build_slot_mappings_by_layer": "slot_mappings kv_cache_config",
    f"{V2_FOLDER}.block_table:BlockTables.compute_slot_mappings": "idx_mapping query_start_loc positions "
    "num_tokens_padded out",
    "vllm.v1.worker.utils:AttentionGroup.map_to_kernel_block_table": "block_table ubatch_idx",
    # Ranks that exchange something inside the draft loop (v2/ranks.py).
    "vllm.distributed.parallel_state:graph_capture": "device",
    "vllm.distributed.parallel_state:GroupCoordinator.all_reduce": "input_",
    "vllm.distributed.parallel_state:GroupCoordinator.all_gather": "input_ dim",
    f"{COMMUNICATORS}.cuda_communicator:CudaCommunicator.all_gather": "input_ dim",
    f"{COMMUNICATORS}.cuda_communicator:CudaCommunicator.custom_all_gather": "input_",
    f"{COMMUNICATORS}.custom_all_reduce:CustomAllreduce.should_custom_all_gather": "inp",
    f"{COMMUNICATORS}.pynccl:PyNcclCommunicator.__init__": "group device library_path",
    f"{COMMUNICATORS}.pynccl:PyNcclCommunicator.all_reduce": "in_tensor out_tensor op stream",
    f"{COMMUNICATORS}.pynccl:PyNcclCommunicator.all_gather": "output_tensor input_tensor stream",
    f"{COMMUNICATORS}.pynccl:PyNcclCommunicator.destroy": "",
    # Models with this attention are refused (decoder.py).
    "vllm.model_executor.layers.attention:PrefillPrefixLMAttention.get_kv_cache_spec": "vllm_config",
    # What `selfspec verify` plants faults around, and asks of an engine.
    f"{V1_RUNNER}:GPUModelRunner.propose_draft_token_ids": "scheduler_output sampled_token_ids sampling_metadata "
    "hidden_states sample_hidden_states aux_hidden_states spec_decode_metadata common_attn_metadata slot_mappings",
    "vllm.v1.sample.rejection_sampler:RejectionSampler.forward": "metadata draft_probs logits sampling_metadata",
    # V1: a bonus token behind min_tokens.
    "vllm.v1.sample.sampler:Sampler.apply_logits_processors": "logits sampling_metadata predict_bonus_token",
    f"{MIN_TOKENS}.update_state": "batch_update",
    "vllm.entrypoints.llm:LLM.reset_prefix_cache": "reset_running_requests reset_connector",
    # What `selfspec profile` puts ranges around.
    f"{V1_RUNNER}:GPUModelRunner.execute_model": "scheduler_output intermediate_tensors",
    f"{V1_RUNNER}:GPUModelRunner.sample_tokens": "grammar_output",
    f"{V1_RUNNER}:GPUModelRunner.get_model": "",
    f"{V2_RUNNER}:GPUModelRunner.get_model": "",
    f"{V2_RUNNER}:GPUModelRunner.sample_tokens": "grammar_output",
    f"{SCHEDULER}.schedule": "throttle_prefills",
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs": "engine_core_outputs engine_core_timestamp "
    "iteration_stats weight_version",
    "vllm.v1.engine.llm_engine:LLMEngine.step": "",
    # Both runners, and the driver.
    "vllm.forward_context:set_forward_context": "attn_metadata vllm_config num_tokens num_tokens_across_dp "
    "cudagraph_runtime_mode batch_descriptor ubatch_slices slot_mapping skip_compiled is_padding",
    "vllm.forward_context:BatchDescriptor.__init__": "num_tokens num_reqs uniform has_lora num_active_loras",
    "vllm.compilation.wrapper:TorchCompileWithNoGuardsWrapper.__init__": "compile_prefix is_encoder",
    "vllm.config:set_current_vllm_config": "vllm_config check_compile prefix",
    "vllm.distributed.parallel_state:cleanup_dist_env_and_memory": "shutdown_ray",
    # 8-bit copies.
    "vllm._custom_ops:scaled_fp8_quant": "input scale num_token_padding scale_ub use_per_token_if_dynamic output "
    "group_shape",
    "vllm._custom_ops:cutlass_scaled_mm": "a b scale_a scale_b out_dtype bias",
    # Norms and activations that round (weights/fused.py).
    "vllm.compilation.passes.inductor_pass:CallableInductorPass.__init__": "callable uuid",
    "vllm.compilation.passes.inductor_pass:InductorPass.hash_source": "srcs",
    # Copies of experts.
    "vllm._custom_ops:cpu_prepack_moe_weight": "weight isa",
    f"{MOE}.fused_moe_method_base:FusedMoEMethodBase.__init__": "moe",
    f"{MOE}.fused_moe_method_base:FusedMoEMethodBase.apply": "layer x topk_weights topk_ids shared_experts "
    "shared_experts_input",
    f"{MOE}.fused_moe_method_base:FusedMoEMethodBase.get_fused_moe_quant_config": "layer",
    f"{MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.__init__": "moe",
    f"{MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.process_weights_after_loading": "layer",
    f"{MOE}.modular_kernel:FusedMoEKernel.apply": "hidden_states w1 w2 topk_weights topk_ids activation "
    "global_num_experts expert_map apply_router_weight_on_input shared_experts shared_experts_input",
    f"{MOE}.oracle.fp8:make_fp8_moe_kernel": "moe_quant_config moe_config experts_cls fp8_backend routing_tables",
    # The draft's attention: what it stands in for, and what it calls where its kernel does not fit.
    f"{ATTENTION}:Attention.forward": "query key value output_shape output_dtype",
    f"{ATTENTION}:get_attention_context": "layer_name",
    f"{FLASH}:FlashAttentionImpl.do_kv_cache_update": "layer key value kv_cache slot_mapping",
    f"{FLASH}:FlashAttentionImpl.forward": "layer query key value kv_cache attn_metadata output output_scale "
    "output_block_scale",
    # weights/lowbit.py calls these.
    f"{MOE}.oracle.int_wna16:make_wna16_moe_kernel": "moe_quant_config moe_config experts_cls backend routing_tables",
    f"{MOE}.oracle.int_wna16:make_wna16_moe_quant_config": "w1_scale w2_scale group_size num_bits w1_zp w2_zp w1_bias "
    "w2_bias a1_gscale a2_gscale gemm1_clamp_limit gemm1_alpha gemm1_beta",
}

# Class -> fields that we fill or read.
FIELDS = {
    "vllm.v1.kv_cache_interface:FullAttentionSpec": "sliding_window attention_chunk_size",
    "vllm.v1.kv_cache_interface:RSWASpec": "rswa_window",
    "vllm.v1.attention.backend:CommonAttentionMetadata": "query_start_loc query_start_loc_cpu seq_lens "
    "seq_lens_cpu_upper_bound num_reqs num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping "
    "positions",
    "vllm.v1.metrics.stats:SchedulerStats": "num_kv_fetch_reqs_by_stage spec_decoding_stats",
    "vllm.v1.outputs:ModelRunnerOutput": "req_ids",
    "vllm.v1.metrics.stats:RequestStateStats": "first_token_latency first_token_ts last_token_ts",
    "vllm.engine.arg_utils:EngineArgs": "speculative_config additional_config worker_extension_cls scheduler_cls "
    "enable_lora enable_elastic_ep "
    "pipeline_parallel_size data_parallel_size kv_cache_memory_bytes disable_log_stats offload_group_size "
    "offload_backend prefill_context_parallel_size decode_context_parallel_size watermark_config "
    "max_num_batched_tokens max_num_seqs max_logprobs",
    "vllm.v1.core.sched.output:NewRequestData": "req_id prefill_token_ids sampling_params",
    "vllm.v1.core.sched.output:CachedRequestData": "resumed_req_ids",
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": "draft_token_ids num_draft_tokens",
    f"{V2_FOLDER}.sample.output:SamplerOutput": "sampled_token_ids num_sampled num_rejected",
    f"{FLASH}:FlashAttentionMetadata": "max_query_len seq_lens block_table",
    "vllm.config:SchedulerConfig": "scheduler_cls async_scheduling",
    "vllm.config:ParallelConfig": "worker_cls worker_extension_cls tensor_parallel_size decode_context_parallel_size "
    "prefill_context_parallel_size",
    "vllm.config:ModelConfig": "quantization dtype skip_tokenizer_init",
    "vllm.config:CompilationConfig": "static_forward_context compile_sizes splitting_ops cudagraph_mode "
    "inductor_compile_config",
    "vllm.config:VllmConfig": "additional_config speculative_config kv_transfer_config",
    "vllm.config:SpeculativeConfig": "method model num_speculative_tokens quantization draft_sample_method "
    "rejection_sample_method disable_padded_drafter_batch draft_model_config synthetic_acceptance_rates "
    "synthetic_acceptance_length num_speculative_tokens_per_batch_size",
    "vllm.v1.sample.metadata:SamplingMetadata": "temperature top_k top_p all_greedy all_random logitsprocs "
    "spec_token_ids thinking_budget_state_holder",
    "vllm.v1.worker.utils:AttentionGroup": "layer_names kv_cache_group_id kv_cache_spec backend",
    f"{V2_FOLDER}.input_batch:InputBatch": "req_ids num_reqs num_draft_tokens num_draft_tokens_per_req cu_num_logits "
    "num_tokens_after_padding idx_mapping expanded_idx_mapping expanded_local_pos seq_lens seq_lens_cpu_upper_bound "
    "logits_indices input_ids positions query_start_loc",
    f"{V2_RUNNER}:ExecuteModelState": "input_batch num_spec_tokens_to_schedule",
    f"{V2_FOLDER}.cudagraph_utils:BatchExecutionDescriptor": "cg_mode num_tokens num_reqs "
    "uniform_token_count max_query_len",
    f"{V2_FOLDER}.attn_utils:AttentionCGSupportInfo": "min_cg_support",
    "vllm.config:CacheConfig": "kv_sharing_fast_prefill",
    "vllm.config.kernel:KernelConfig": "linear_backend",
    "vllm.v1.core.sched.output:SchedulerOutput": "scheduled_new_reqs finished_req_ids num_scheduled_tokens "
    "num_spec_tokens_to_schedule total_num_scheduled_tokens has_structured_output_requests",
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": "sampling_params mrope_position_delta",
}

# Class -> attributes that its __init__, or a base class's, sets and that we read or replace.
ATTRIBUTES = {
    V1_PROPOSER: "vllm_config speculative_config max_model_len num_speculative_tokens arange input_ids positions "
    "kv_cache_gid draft_attn_groups use_fp64_gumbel",
    f"{V1_RUNNER}:GPUModelRunner": "requests input_batch drafter effective_drafter_max_model_len rejection_sampler "
    "compilation_config kv_cache_config",
    f"{V2_RUNNER}:GPUModelRunner": "rejection_sampler speculator block_tables compilation_config kv_cache_config "
    "req_states execute_model_state draft_tokens_handler num_speculative_steps pp_handler "
    "cudagraph_manager",
    f"{V2_FOLDER}.model_states.default:DefaultModelState": "rope_state",
    f"{V2_FOLDER}.mm.rope:RopeState": "prefill_delta",
    f"{V2_FOLDER}.buffer_utils:StagedWriteTensor": "gpu",
    f"{V2_FOLDER}.buffer_utils:UvaBackedTensor": "gpu",
    MIN_TOKENS: "min_toks",
    "vllm.v1.sample.logits_processor.state:LogitsProcessors": "non_argmax_invariant",
    "vllm.v1.worker.gpu_input_batch:InputBatch": "num_tokens_no_spec num_prompt_tokens token_ids_cpu block_table "
    "max_num_reqs sampling_metadata thinking_budget_state_holder",
    "vllm.v1.worker.block_table:BlockTable": "block_size",
    V2_SPECULATOR: "vllm_config device num_speculative_steps max_model_len dp_size dp_rank input_buffers idx_mapping "
    "temperature seeds draft_tokens draft_logits current_draft_step sample_src_positions "
    "hidden_states decode_cudagraph_manager supports_decode_metadata_update draft_max_seq_len supports_mm_inputs "
    "draft_is_prefilling",
    f"{V2_FOLDER}.spec_decode.rejection_sampler:RejectionSampler": "sampler",
    f"{V2_FOLDER}.sample.sampler:Sampler": "req_states logprob_token_ids_state sampling_states logprobs_mode",
    "vllm.v1.worker.utils:AttentionGroup": "supports_draft_decode_metadata_update update_draft_decode_metadata",
    f"{V2_FOLDER}.states:RequestState": "req_id_to_index",
    f"{V2_FOLDER}.cudagraph_utils:CudaGraphManager": "vllm_config decode_query_len _candidates "
    "_capture_descs cudagraph_mode compilation_config max_num_reqs graphs pool",
    "vllm.distributed.parallel_state:GroupCoordinator": "device_communicator cpu_group rank_in_group world_size",
    f"{COMMUNICATORS}.cuda_communicator:CudaCommunicator": "ca_comm",
    f"{COMMUNICATORS}.pynccl:PyNcclCommunicator": "disabled",
    SCHEDULER: "vllm_config scheduler_config requests running waiting max_num_running_reqs dynamic_sd_lookup "
    "use_v2_model_runner",
    "vllm.v1.engine.core:EngineCore": "batch_queue scheduler model_executor vllm_config",
    "vllm.v1.engine.core:EngineCoreProc": "input_queue",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor": "driver_worker",
    "vllm.v1.executor.uniproc_executor:AsyncOutputFuture": "async_output",
    "vllm.v1.metrics.loggers:StatLoggerManager": "stat_loggers engine_indexes",
    "vllm.v1.metrics.loggers:PrometheusStatLogger": "per_engine_labelvalues "
    "gauge_scheduler_running counter_generation_tokens",
    f"{V2_FOLDER}.async_utils:AsyncOutput": "model_runner_output copy_event",
    "vllm.v1.request:Request": "num_computed_tokens is_prefill_chunk",
    "vllm.v1.engine.llm_engine:LLMEngine": "output_processor engine_core model_executor",
    WORKER: "device rank model_runner use_v2_model_runner",
    f"{V2_FOLDER}.input_batch:InputBuffers": "input_ids positions query_start_loc seq_lens",
    f"{V2_FOLDER}.block_table:BlockTables": "input_block_tables slot_mappings block_sizes",
    f"{MOE}.runner.moe_runner:MoERunner": "router routed_experts layer_name",
    f"{MOE}.routed_experts:RoutedExperts": "moe_config quant_method",
    f"{MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod": "unquantized_backend moe_kernel moe_quant_config",
    f"{ATTENTION}:Attention": "layer_name num_heads num_kv_heads head_size head_size_v attn_backend attn_type "
    "kv_cache_dtype kv_sharing_target_layer_name impl kv_cache",
    f"{FLASH}:FlashAttentionImpl": "sliding_window logits_soft_cap alibi_slopes sinks scale",
    **{f"vllm.lora.layers:{name}WithLoRA": "base_layer" for name in LORA_LAYERS},
}


def signatures(release: Release) -> dict[str, list[str]]:
    """Target -> its parameters in `release`."""
    return {target: words.split() for target, words in {**SIGNATURES, **release.signatures}.items()}
