"""What early exit cannot do is refused by name before an engine starts, with what to do instead.

Each function raises SettingsError. docs/limits.md has a row for every one (tests/contract/test_compatibility.py)."""

from __future__ import annotations

from collections.abc import Iterable

from selfspec_cli.early_exit.contexts import Context
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES, require_device
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.vllm_plugin import vllm_names as vllm


def require_runner(device: str, v2: bool | None, has_triton: bool = True) -> None:
    """Raises SettingsError for a device without early exit, and on a CPU or on CUDA for the model runner without it.
    v2: None where vLLM chooses. has_triton: with a backend of Triton's a CPU has early exit on both runners."""
    if device not in ("cpu", "cuda"):
        raise SettingsError(
            f"early exit is not supported on {device}; allowed: cpu and cuda; serve without a speculative_config"
        )
    needed = "V2" if device == "cuda" else "V1"
    if v2 is None or v2 == (needed == "V2") or (device == "cpu" and has_triton):
        return
    why = " without a Triton backend for CPUs" if device == "cpu" else ""
    raise SettingsError(
        f"early exit on {device} needs vLLM's {needed} model runner{why}; unset VLLM_USE_V2_MODEL_RUNNER={int(v2)}"
    )


def refuse_runner() -> None:
    """The runner that the environment asks for; one that vLLM falls back to is refused when the worker starts."""
    require_runner(vllm.current_platform.device_type, vllm.envs.VLLM_USE_V2_MODEL_RUNNER, vllm.HAS_TRITON)


NO_TARGETS = {
    "is_hybrid": "it has layers with a recurrent state, in which rejected drafts would stay",
    "is_attention_free": "it has layers with a recurrent state, in which rejected drafts would stay",
    "is_encoder_decoder": "its decoder also attends to an encoder's states, which a draft step does not have",
    "is_diffusion": "it makes several tokens at once, and none of them after the other",
}
"""Property of vLLM's ModelConfig that early exit cannot have -> why."""


def refuse_model(target: vllm.ModelConfig) -> None:
    """What a draft would spoil or get wrong. A rejected draft leaves nothing in a KV cache that is ever read; it would
    have moved a recurrent state on for good."""
    if target.runner_type != "generate":
        raise SettingsError(
            f"model {target.model} is not supported with early exit: vLLM runs it as a {target.runner_type} model, "
            "which generates no tokens; leave the speculative_config out"
        )
    for name, reason in NO_TARGETS.items():
        if getattr(target, name):
            raise SettingsError(
                f"model {target.model} is not supported with early exit: {reason}; allowed: decoders of attention "
                "layers; this one can be served without a speculative_config, or with vLLM's "
                "method 'ngram'"
            )


def refuse_latents(target: vllm.ModelConfig, device: str | None = None) -> None:
    """Keys and values that are latent vectors (MLA), on a CPU. device: where vLLM runs; None asks it.
    vLLM 0.32.0's backend CPU_MLA does not give the tokens of a verify pass what one token at a time gets: with vLLM's
    own n-gram drafts, greedy output of a tiny DeepSeek-V2 parts from the baseline's, with VLLM_MLA_DISABLE=1 too."""
    latent = target.use_mla or target.is_deepseek_mla
    if latent and (device or vllm.current_platform.device_type) == "cpu":
        raise SettingsError(
            f"model {target.model} is not supported with early exit on a CPU: vLLM's latent attention (MLA) for CPUs "
            "is not right for several tokens at once, whoever drafted them; serve it without a speculative_config"
        )


def refuse_adapters(args: vllm.EngineArgs, target: vllm.ModelConfig) -> None:
    """Drafts leave adapters out (weights/shared.py), which cannot be done with those of experts."""
    if args.enable_lora and target.is_moe:
        raise SettingsError(
            "enable_lora = True is not supported with early exit for a mixture of experts: vLLM applies the adapters "
            "inside the experts' kernels, for the tokens of the verify pass; allowed: False, with the adapter merged "
            "into the model's weights"
        )


ONE_ONLY = {
    "pipeline_parallel_size": (
        "draft and target share every layer, so all layers must be on one worker",
        "tensor_parallel_size splits the model over GPUs instead",
    ),
    "data_parallel_size": (
        "ranks would draft different numbers of steps and wait for each other",
        "start one server for each GPU, or each group of tensor_parallel_size GPUs, instead",
    ),
    "prefill_context_parallel_size": ("a draft step's attention is not split over ranks", "use tensor_parallel_size"),
    "decode_context_parallel_size": ("a draft step's attention is not split over ranks", "use tensor_parallel_size"),
}
"""Argument of an engine of which early exit takes 1 only -> why, and what to do instead."""


def refuse_gate(settings: ResolvedSettings) -> None:
    """A gate of another package may have no expression for CUDA; before the model is loaded is the time to say so."""
    if vllm.current_platform.is_cuda():
        require_device(GATES[settings.gate.kind].rule(settings.threshold))


def refuse_engine(args: vllm.EngineArgs) -> None:
    """What no runner of ours can do is refused before anything starts, with what to do instead."""
    for name, (reason, instead) in ONE_ONLY.items():
        value = getattr(args, name)
        if value > 1:
            raise SettingsError(f"{name} = {value} is not supported with early exit ({reason}); allowed: 1; {instead}")
    if args.enable_elastic_ep:
        raise SettingsError(
            "enable_elastic_ep = True is not supported with early exit: it adds data-parallel ranks to a live engine, "
            "which would draft different numbers of steps and wait for each other; allowed: False"
        )
    if args.watermark_config is not None:
        raise SettingsError(
            "watermark_config is not supported with early exit: drafts would be drawn without the watermark; serve "
            "watermarked text without a speculative_config"
        )
    if args.offload_group_size or args.offload_backend == "prefetch":
        raise SettingsError(
            f"offload_group_size = {args.offload_group_size} (weights fetched while layers run) is not supported with "
            "early exit: layers share buffers, which are right only if every pass runs all layers; allowed: "
            "cpu_offload_gb"
        )


def refuse_streamed_input() -> None:
    """Sessions whose input streams in, turn by turn (vLLM's StreamingInput): each keeps what was computed of the turn
    before, which ends at another token where the last drafts were accepted."""
    raise SettingsError(
        "input that streams in is not supported with early exit: what the next turn remembers of a turn's last tokens "
        "would depend on the drafts that were accepted; allowed: send each turn as a request of its own"
    )


def refuse_fitted_copies(path: str | None, shards: int) -> None:
    """Copies that were made from data are whole weights. Raises SettingsError for several tensor-parallel ranks."""
    if path is not None and shards > 1:
        raise SettingsError(
            f"draft_weights_path is not supported with tensor_parallel_size = {shards}: the file holds whole weights; "
            "allowed: copies that are made at load, without draft_weights_path"
        )


NARROWER = ("sliding_window", "attention_chunk_size", "rswa_window")
"""Field of vLLM's FullAttentionSpec, or of a spec made from it, that is not None for attention to less than all."""


def refuse_context(context: Context, groups: Iterable[vllm.AttentionGroup]) -> None:
    """Drafts that attend to a part of the context read shortened block tables, for attention to the whole context
    alone.
    groups: vLLM's attention groups that draft, of which several may share a KV cache group. Raises SettingsError."""
    if context.is_full:
        return
    drafting = list(groups)
    whole = all(
        isinstance(group.kv_cache_spec, vllm.FullAttentionSpec)
        and not any(getattr(group.kv_cache_spec, name, None) for name in NARROWER)
        for group in drafting
    )
    if not whole or len({group.kv_cache_group_id for group in drafting}) > 1:
        ((key, value),) = context.settings().items()
        raise SettingsError(
            f"{key} = {value} is not supported for this model: some of its layers do not attend to the whole "
            f"context, and count positions in it; leave {key} out"
        )
