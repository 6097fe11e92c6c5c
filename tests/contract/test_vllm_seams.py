"""Every name, signature and attribute of vLLM that the plugin relies on is still there. No engine is started.

One of these fails before a user's run does when vLLM moves. Signatures are compared whole, not only for what we pass: a
new parameter of a method that we override is a question to answer, not a detail.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pkgutil
import textwrap
import types
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec_cli.vllm_plugin import compat

pytestmark = pytest.mark.contract

V1_PROPOSER = "vllm.v1.spec_decode.draft_model:DraftModelProposer"
V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_FOLDER = "vllm.v1.worker.gpu"
V2_SPECULATOR = f"{V2_FOLDER}.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator"
V2_GRAPHS = f"{V2_FOLDER}.spec_decode.target_dependent_ar.cudagraph_utils:SpeculatorCudaGraphManager"
V2_RUNNER = f"{V2_FOLDER}.model_runner"
LINEAR = "vllm.model_executor.layers.linear"

# Target -> its parameters, in order. self is not listed.
SIGNATURES = {
    # What compat.py replaces: the replacement is called with these.
    "vllm.engine.arg_utils:EngineArgs.create_speculative_config": "target_model_config target_parallel_config",
    "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device": "",
    f"{V2_RUNNER}:init_speculator": "vllm_config device req_states",
    "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model": "vllm_config model_config prefix",
    # V1: overridden.
    f"{V1_PROPOSER}.__init__": "vllm_config device runner",
    f"{V1_PROPOSER}.load_model": "target_model",
    f"{V1_PROPOSER}.initialize_attn_backend": "kv_cache_config kernel_block_sizes",
    f"{V1_PROPOSER}.dummy_run": "num_tokens use_cudagraphs is_graph_capturing slot_mappings",
    f"{V1_PROPOSER}.prepare_next_token_ids_cpu": "sampled_token_ids requests gpu_input_batch num_scheduled_tokens",
    f"{V1_PROPOSER}.prepare_inputs": "common_attn_metadata sampled_token_ids num_draft_tokens",
    f"{V1_PROPOSER}.propose": "num_speculative_tokens target_token_ids target_positions target_hidden_states "
    "next_token_ids token_indices_to_sample common_attn_metadata sampling_metadata mm_embed_inputs "
    "num_rejected_tokens_gpu slot_mappings",
    f"{V1_PROPOSER}.take_last_draft_probs": "",
    f"{V1_PROPOSER}._raise_if_padded_drafter_batch_disabled": "",
    # V1: called.
    "vllm.v1.spec_decode.llm_base_proposer:compute_probs_and_sample_next_token": "logits sampling_metadata "
    "use_fp64_gumbel",
    "vllm.v1.worker.utils:AttentionGroup.get_metadata_builder": "ubatch_id",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build": "common_prefix_len common_attn_metadata fast_build",
    "vllm.v1.worker.block_table:BlockTable.get_device_tensor": "num_reqs",
    "vllm.v1.worker.block_table:MultiGroupBlockTable.__getitem__": "idx",
    # V2: overridden.
    f"{V2_SPECULATOR}.__init__": "vllm_config device",
    f"{V2_SPECULATOR}.load_model": "target_model",
    f"{V2_SPECULATOR}.load_draft_model": "target_model target_attn_layer_names",
    f"{V2_SPECULATOR}.set_attn": "model_state kv_cache_config block_tables target_input_buffers target_attn_groups",
    f"{V2_SPECULATOR}._configure_decode_metadata_update": "",
    f"{V2_SPECULATOR}.init_cudagraph_manager": "cudagraph_mode",
    f"{V2_SPECULATOR}.capture": "",
    f"{V2_SPECULATOR}.propose": "input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states "
    "num_sampled num_rejected last_sampled next_prefill_tokens temperature seeds dp_sync_state dummy_run "
    "skip_attn_for_dummy_run mm_inputs is_profile num_speculative_tokens",
    f"{V2_SPECULATOR}.sample_draft": "hidden_states sample_src_positions idx_mapping temperature seeds draft_step "
    "draft_logits spec_step_idx",
    f"{V2_SPECULATOR}.compute_draft_logits": "hidden_states spec_step_idx",
    # V2: called.
    f"{V2_SPECULATOR}._copy_request_inputs": "num_reqs idx_mapping temperature seeds dummy_run",
    f"{V2_SPECULATOR}._build_uniform_attn_metadata": "batch_desc num_reqs num_query_per_req seq_lens_cpu_upper_bound "
    "step causal dcp_local_seq_lens",
    f"{V2_SPECULATOR}._update_draft_decode_metadata": "attn_metadata num_reqs",
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
    f"{V2_FOLDER}.attn_utils:build_slot_mappings_by_layer": "slot_mappings kv_cache_config",
    f"{V2_FOLDER}.block_table:BlockTables.compute_slot_mappings": "idx_mapping query_start_loc positions "
    "num_tokens_padded out",
    "vllm.v1.worker.utils:AttentionGroup.map_to_kernel_block_table": "block_table ubatch_idx",
    # Both runners, and the driver.
    "vllm.forward_context:set_forward_context": "attn_metadata vllm_config num_tokens num_tokens_across_dp "
    "cudagraph_runtime_mode batch_descriptor ubatch_slices slot_mapping skip_compiled is_padding",
    "vllm.forward_context:BatchDescriptor.__init__": "num_tokens num_reqs uniform has_lora num_active_loras",
    "vllm.compilation.wrapper:TorchCompileWithNoGuardsWrapper.__init__": "compile_prefix is_encoder",
    "vllm.compilation.backends:set_model_tag": "tag is_encoder",
    "vllm.config:set_current_vllm_config": "vllm_config check_compile prefix",
    "vllm.distributed.parallel_state:cleanup_dist_env_and_memory": "shutdown_ray",
    # 8-bit copies.
    "vllm._custom_ops:scaled_fp8_quant": "input scale num_token_padding scale_ub use_per_token_if_dynamic output "
    "group_shape",
    "vllm._custom_ops:cutlass_scaled_mm": "a b scale_a scale_b out_dtype bias",
}

# Class -> fields that we fill or read.
FIELDS = {
    "vllm.v1.attention.backend:CommonAttentionMetadata": "query_start_loc query_start_loc_cpu seq_lens "
    "seq_lens_cpu_upper_bound num_reqs num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping "
    "positions",
    "vllm.v1.metrics.stats:RequestStateStats": "first_token_latency first_token_ts last_token_ts",
    "vllm.engine.arg_utils:EngineArgs": "speculative_config additional_config worker_extension_cls enable_lora "
    "pipeline_parallel_size data_parallel_size kv_cache_memory_bytes disable_log_stats offload_group_size "
    "offload_backend",
    "vllm.config:ParallelConfig": "worker_extension_cls tensor_parallel_size",
    "vllm.config:ModelConfig": "quantization dtype",
    "vllm.config:CompilationConfig": "static_forward_context compile_sizes",
    "vllm.config:VllmConfig": "additional_config speculative_config",
    "vllm.config:SpeculativeConfig": "method model num_speculative_tokens quantization draft_sample_method "
    "rejection_sample_method disable_padded_drafter_batch draft_model_config synthetic_acceptance_rates "
    "synthetic_acceptance_length enable_adaptive_verification num_speculative_tokens_per_batch_size",
    "vllm.v1.sample.metadata:SamplingMetadata": "temperature all_greedy all_random",
    "vllm.v1.worker.utils:AttentionGroup": "layer_names kv_cache_group_id backend",
    f"{V2_FOLDER}.input_batch:InputBatch": "req_ids num_reqs num_draft_tokens_per_req cu_num_logits "
    "num_tokens_after_padding idx_mapping expanded_idx_mapping expanded_local_pos seq_lens seq_lens_cpu_upper_bound",
    f"{V2_FOLDER}.cudagraph_utils:BatchExecutionDescriptor": "cg_mode num_tokens",
}

# Class -> attributes that its __init__, or a base class's, sets and that we read or replace.
ATTRIBUTES = {
    V1_PROPOSER: "vllm_config speculative_config max_model_len num_speculative_tokens arange input_ids positions "
    "kv_cache_gid draft_attn_groups use_fp64_gumbel _enable_probabilistic_draft_probs",
    f"{V1_RUNNER}:GPUModelRunner": "input_batch drafter effective_drafter_max_model_len",
    "vllm.v1.worker.gpu_input_batch:InputBatch": "num_tokens_no_spec token_ids_cpu block_table",
    "vllm.v1.worker.block_table:BlockTable": "block_size",
    V2_SPECULATOR: "vllm_config device num_speculative_steps max_model_len dp_size dp_rank input_buffers idx_mapping "
    "temperature seeds draft_tokens draft_logits draft_token_confidence_probs current_draft_step sample_src_positions "
    "hidden_states decode_cudagraph_manager supports_decode_metadata_update draft_max_seq_len supports_mm_inputs",
    f"{V2_FOLDER}.spec_decode.rejection_sampler:RejectionSampler": "sampler",
    f"{V2_FOLDER}.sample.sampler:Sampler": "req_states",
    f"{V2_FOLDER}.input_batch:InputBuffers": "input_ids positions query_start_loc seq_lens",
    f"{V2_FOLDER}.block_table:BlockTables": "input_block_tables slot_mappings",
}


@pytest.mark.parametrize("patch", compat.PATCHES, ids=lambda patch: patch.target)
def test_patch_target_and_replacement_exist(patch):
    found = {target: there for target, there, _ in compat.check()}
    assert found[patch.target], f"vLLM moved {patch.target}"
    assert callable(pkgutil.resolve_name(patch.replacement))


@pytest.mark.parametrize(("target", "parameters"), SIGNATURES.items(), ids=SIGNATURES.keys())
def test_signature(target, parameters):
    assert without_self(pkgutil.resolve_name(target)) == parameters.split()


@pytest.mark.parametrize(("target", "names"), FIELDS.items(), ids=FIELDS.keys())
def test_dataclass_fields(target, names):
    there = {field.name for field in dataclasses.fields(pkgutil.resolve_name(target))}
    assert set(names.split()) <= there


@pytest.mark.parametrize(("target", "names"), ATTRIBUTES.items(), ids=ATTRIBUTES.keys())
def test_attributes_are_set(target, names):
    assert set(names.split()) <= assigned(pkgutil.resolve_name(target))


def test_runner_sets_attention_groups_before_the_drafter_asks_for_them():
    source = inspect.getsource(module(V1_RUNNER).GPUModelRunner)
    builders = source.index("attn_group.create_metadata_builders(")
    assert source.index("self.attn_groups.append(") < builders < source.index("self.drafter.initialize_attn_backend(")


def test_v1_runner_calls_the_proposer_as_we_expect():
    (propose,) = [call for call in calls(V1_RUNNER, "self.drafter.propose") if "next_token_ids" in keywords(call)]
    assert not propose.args, "propose() takes keywords only here"
    assert {"num_speculative_tokens", "sampling_metadata"} <= keywords(propose)
    assert [len(call.args) for call in calls(V1_RUNNER, "self.drafter.prepare_next_token_ids_cpu")] == [4]
    assert [len(call.args) for call in calls(V1_RUNNER, "self.drafter.prepare_inputs")] == [3]
    assert len(calls(V1_RUNNER, "self.drafter.take_last_draft_probs")) == 1
    assert calls("vllm.v1.worker.cpu_model_runner", "self.drafter.load_model")


def test_v1_runner_hands_sampled_lists_to_unpadded_drafters():
    """`disable_padded_drafter_batch` is what makes the runner draft after its bookkeeping, from lists on the host."""
    source = inspect.getsource(module(V1_RUNNER).GPUModelRunner.sample_tokens)
    assert "not spec_config.disable_padded_drafter_batch" in source
    assert "propose_draft_token_ids(valid_sampled_token_ids)" in source
    assert "effective_drafter_max_model_len" in inspect.getsource(
        module(V1_RUNNER).GPUModelRunner._input_fits_in_drafter
    )


def test_cpu_platform_keeps_async_scheduling_off():
    """The V1 proposer reads the host's token ids, which async scheduling would not have filled in yet."""
    from vllm.platforms.cpu import CpuPlatform

    assert "scheduler_config.async_scheduling = False" in inspect.getsource(CpuPlatform.check_and_update_config)


def test_v2_runner_calls_the_speculator_as_we_expect():
    real, dummy = sorted(calls(V2_RUNNER, "self.speculator.propose"), key=lambda call: -len(call.args))
    ours = without_self(pkgutil.resolve_name("selfspec_cli.vllm_plugin.v2.speculator:EarlyExitSpeculator.propose"))
    assert keywords(real) | keywords(dummy) <= set(ours)
    assert ours[: len(real.args)] == without_self(pkgutil.resolve_name(f"{V2_SPECULATOR}.propose"))[: len(real.args)]
    assert [len(call.args) for call in calls(V2_RUNNER, "self.speculator.set_attn")] == [5]
    assert calls(V2_RUNNER, "self.speculator.capture")
    assert calls(V2_RUNNER, "self.speculator.init_cudagraph_manager")


def test_compile_wrapper_reads_the_state_that_we_reset():
    from vllm.compilation import decorators

    source = inspect.getsource(decorators)
    for name in ("compiled", "aot_compiled_fn", "was_aot_compile_fn_loaded_from_disk", "_compile_tag"):
        assert f"self.{name} =" in source, name
    assert "self.do_not_compile" in source
    assert "self.forward" in inspect.getsource(module("vllm.compilation.wrapper").TorchCompileWithNoGuardsWrapper)


def test_linear_layers_multiply_through_their_quant_method_alone():
    """A copy replaces `quant_method` and takes `weight` away; a forward that reads the weight itself would miss it."""
    kinds = [kind for kind in vars(module(LINEAR)).values() if inspect.isclass(kind)]
    kinds = [kind for kind in kinds if issubclass(kind, module(LINEAR).LinearBase) and "forward" in vars(kind)]
    assert {"ReplicatedLinear", "ColumnParallelLinear", "RowParallelLinear"} <= {kind.__name__ for kind in kinds}
    for kind in kinds:
        source = inspect.getsource(kind.forward)
        assert "self.quant_method.apply(self, " in source, kind
        assert "self.weight" not in source, kind


@pytest.mark.parametrize("name", ["is_moe", "is_hybrid", "is_attention_free", "uses_mrope"])
def test_what_is_refused_of_a_model_can_be_asked(name):
    assert isinstance(getattr(module("vllm.config").ModelConfig, name), property)


@pytest.mark.parametrize(("capability", "known"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_without_8_bit_kernels_gets_no_copies(monkeypatch, capability, known):
    from vllm.platforms.interface import DeviceCapability

    from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
    from selfspec_cli.vllm_plugin.weights.copied import facts_of

    target = types.SimpleNamespace(quantization=None, dtype=torch.bfloat16, is_moe=False)
    parallel = types.SimpleNamespace(tensor_parallel_size=1)
    assert facts_of(target, parallel).device == "cpu"  # what the platform here answers
    platform = types.SimpleNamespace(
        is_cuda=lambda: True, get_device_capability=lambda: DeviceCapability(*capability), device_name="NVIDIA A100"
    )
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    reason = DRAFT_WEIGHTS["fp8"].reason_against(facts_of(target, parallel))
    assert reason is None if known else "compute capability 8.9" in reason


def test_counters_have_the_names_that_engine_py_reads():
    source = inspect.getsource(module("vllm.v1.spec_decode.metrics"))
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"):
        assert f'"vllm:spec_decode_num_{name}"' in source


def test_decoders_cut_their_loop_at_end_layer():
    """At least sixty files of vLLM's models loop up to self.end_layer, those that the tests run among them."""
    from vllm.model_executor import models

    folder = models.__path__[0]
    cutting = {file.stem for file in Path(folder).glob("*.py") if "self.end_layer)" in file.read_text()}
    assert len(cutting) >= 60
    assert {"llama", "qwen3_moe", "gemma", "gemma2", "gemma3"} <= cutting


def test_the_draft_takes_over_the_linear_layers_that_vllm_leaves_to_pytorch():
    """linear.py asks a layer's quant_method what it multiplies with; on CUDA that is PyTorch's linear by default."""
    from torch import nn
    from vllm.model_executor.layers.utils import default_unquantized_gemm

    from selfspec_cli.vllm_plugin.weights.linear import SharedLinear, on_own_weight

    names, layers = module(LINEAR), module("vllm.model_executor.layers.utils")
    assert inspect.getsource(layers.dispatch_unquantized_gemm).count("return default_unquantized_gemm") == 3
    assert "functional.linear(x, weight, bias)" in inspect.getsource(default_unquantized_gemm)

    class OnCuda(nn.Parameter):
        is_cuda = True

    def layer(method: Any, weight: nn.Parameter, kind: type = names.RowParallelLinear) -> nn.Module:
        made = object.__new__(kind)
        nn.Module.__init__(made)
        made.quant_method, made.weight = method, weight
        return made

    plain = names.UnquantizedLinearMethod()
    assert plain._gemm_impl is not default_unquantized_gemm  # this is a CPU
    plain._gemm_impl = default_unquantized_gemm
    weight = OnCuda(torch.zeros(4, 8), requires_grad=False)
    target = layer(plain, weight)
    changed = on_own_weight(target, "o_proj")
    assert type(changed) is names.RowParallelLinear and changed.weight is weight
    assert isinstance(changed.quant_method, SharedLinear) and target.quant_method is plain
    left = [
        layer(names.UnquantizedLinearMethod(), weight),  # another kernel
        layer(object(), weight),  # quantised
        layer(plain, nn.Parameter(torch.zeros(4, 8), requires_grad=False)),  # on the CPU
        layer(plain, OnCuda(torch.zeros(4, 8, 2), requires_grad=False)),
        layer(plain, weight, nn.Linear),
    ]
    assert [on_own_weight(each, "o_proj") for each in left] == [None] * 5


def without_self(function: Any) -> list[str]:
    return [name for name in inspect.signature(inspect.unwrap(function)).parameters if name != "self"]


def assigned(owner: type) -> set[str]:
    """Names that any method of the class or of its bases assigns on self."""
    names: set[str] = set()
    for kind in owner.__mro__[:-1]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
        except (OSError, TypeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return names


@cache
def module(name: str) -> Any:
    return pkgutil.resolve_name(name)


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse(inspect.getsource(module(name)))


def calls(module_name: str, function: str) -> list[ast.Call]:
    """Every call written `function(...)` in the module, also through cast(Any, ...)."""
    found = [node for node in ast.walk(parsed(module_name)) if isinstance(node, ast.Call)]
    return [call for call in found if ast.unparse(call.func) == function]


def keywords(call: ast.Call) -> set[str]:
    return {keyword.arg for keyword in call.keywords if keyword.arg}
