"""The layers that draft as one kernel, where a model is one that the kernel knows.

There are two such kernels, for up to MOST tokens and, in engines for more requests, for up to MOST_WIDE. The engine's
graphs are for one number of tokens each, so the choice between them and the kernels for single products falls when a
graph records a step. Only drafts are computed so: the verify pass decides, on kernels of vLLM's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfspec_cli.vllm_plugin.fused_step.layout import Plan, Shape, Stream, gate_and_up, planned, records
from selfspec_cli.vllm_plugin.fused_step.models import (
    WARPS,
    copy_of,
    head_norms_of,
    layers_of,
    linears_of,
    reason_against,
    shape_of,
)
from selfspec_cli.vllm_plugin.fused_step.wide import layout as wide_layout

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import VllmConfig

MOST = 8  # tokens of the kernel that passes each activation with a flag
MOST_WIDE = max(wide_layout.WIDTHS)  # of the one that waits for counters
EVENLY = 0.5
"""See `layout.planned`."""
FEW_SPILLED = 16  # bytes of a thread: numbers that are read a few times a layer. With 128 a step took a quarter longer.
FEW_SPILLED_WIDE = 64  # none of them is in a loop of products, by the machine code of the shapes in experiments/kernels
UNKNOWN = "draft step: kernels for single products, because the KV cache or its tables are laid out otherwise"
LOG2_E = 1.4426950408889634


def fused_step(trunk: nn.Module, vllm_config: VllmConfig, device: torch.device) -> FusedStep | None:
    """The kernel for `trunk` (trunk.first_layers), or None where it cannot be had. The log says which, and why."""
    from selfspec_cli.vllm_plugin.vllm_names import init_logger

    logger = init_logger("vllm.selfspec")
    reason = reason_against(trunk, vllm_config, device)
    if reason is not None:
        logger.info_once("draft step: kernels for single products, because %s", reason)
        return None
    requests = vllm_config.scheduler_config.max_num_seqs
    made = FusedStep(trunk, vllm_config.cache_config.block_size, device, requests)
    logger.info_once(
        "draft step: one kernel for %d layers, up to %d tokens; its own layouts of the copies take %.2f GB more",
        made.shape.layers,
        made.most,
        sum(stream.records.numel() for stream in made.streams) / 1e9,
    )
    return made


class FusedStep:
    """A trunk's weights as the kernels read them, and the kernel for each number of tokens that was asked for.

    requests: of the engine, at most.
    """

    def __init__(self, trunk: Any, page: int, device: torch.device, requests: int) -> None:
        layers = layers_of(trunk)
        attentions = [layer.self_attn for layer in layers]
        self.shape, self._device = shape_of(trunk, page), device
        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        self.plan = planned(self.shape, blocks, WARPS, EVENLY)
        self.stream = stream_of(layers, self.shape, self.plan, device)
        self.wide = wide_stream_of(layers, self.shape, blocks, device) if requests > MOST else None
        self._names = [attention.attn.layer_name for attention in attentions]
        self._scale = float(attentions[0].scaling) * LOG2_E
        self._tensors: dict[str, Tensor | None] = {
            **stacked(layers),
            "final_norm": trunk.norm.weight,
            "embedding": trunk.embed_tokens.weight,
            "rope": attentions[0].rotary_emb.cos_sin_cache,
        }
        self._plan = self.plan.tensor().to(device)
        self._kernels: dict[int, Any] = {}  # by the number of tokens, or by the most of a wide build
        self._caches: dict[tuple[int, ...], Tensor] = {}

    @torch.inference_mode()
    def __call__(self, num_tokens: int, buffers: Any) -> Tensor | None:
        """Normed hidden states [num_tokens, hidden] of a draft step on vLLM's persistent input buffers.

        Call it inside vLLM's forward context. None where the trunk has to run instead: for more tokens, without a KV
        cache, and where a graph would record what has not run before.
        """
        from selfspec_cli.vllm_plugin.fused_step.launch import Arguments, pointer
        from selfspec_cli.vllm_plugin.fused_step.wide.launch import Arguments as WideArguments
        from selfspec_cli.vllm_plugin.vllm_names import get_attention_context

        if num_tokens > self.most:
            return None
        metadata, _, cache, slots = get_attention_context(self._names[0])
        if metadata is None or metadata.max_query_len != 1 or not self._fits(metadata, cache, slots, num_tokens):
            return None
        kernel, caches = self._kernel(num_tokens, cache.shape[2]), self._addresses()
        if kernel is None or caches is None:
            return None
        out = torch.empty(num_tokens, self.shape.hidden, dtype=torch.bfloat16, device=self._device)
        step = {
            "caches": caches,
            "ids": buffers.input_ids,
            "positions": buffers.positions,
            "lengths": metadata.seq_lens,
            "slots": slots,
            "table": metadata.block_table,
            "out": out,
        }
        block, head, token, _ = cache.stride()
        numbers = {
            "cache_block": block,
            "cache_head": head,
            "cache_token": token,
            "cache_value": self.shape.dim,
            "table_row": metadata.block_table.stride(0),
            "scale": self._scale,
        }
        few = num_tokens <= MOST
        stream = self.streams[0 if few else -1]
        tensors = {**self._tensors, **step, "stream": stream.records, "offsets": stream.offsets}
        pointers = {name: pointer(tensor) for name, tensor in tensors.items()} | numbers
        kernel(Arguments(**pointers, plan=pointer(self._plan)) if few else WideArguments(**pointers, tokens=num_tokens))
        return out

    @property
    def most(self) -> int:
        """Most tokens of a step."""
        return MOST if self.wide is None else MOST_WIDE

    @property
    def streams(self) -> list[Any]:
        """Layouts of the copies."""
        return [self.stream] if self.wide is None else [self.stream, self.wide]

    @torch.inference_mode()
    def renew(self, trunk: Any) -> None:
        """Read the copies, norms and biases of now into the tensors whose addresses CUDA graphs hold."""
        layers = layers_of(trunk)
        for stream in self.streams:
            fill(stream, layers)
        for name, tensor in stacked(layers).items():
            mine = self._tensors[name]
            if mine is not None and tensor is not None:
                mine.copy_(tensor)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Numbers of tokens, or most of a wide build, for which it has run, in order."""
        return tuple(sorted(count for count, kernel in self._kernels.items() if kernel is not None))

    def _fits(self, metadata: Any, cache: Tensor, slots: Tensor, tokens: int) -> bool:
        from selfspec_cli.vllm_plugin.attention.one_query import fits

        found = (cache, metadata.seq_lens, metadata.block_table, slots)
        types = (torch.bfloat16, torch.int32, torch.int32, torch.int64)
        known = fits(cache, self.shape.heads, self.shape.dim) and tuple(one.dtype for one in found) == types
        if not known or min(map(len, found[1:])) < tokens:
            from selfspec_cli.vllm_plugin.vllm_names import init_logger

            init_logger("vllm.selfspec").warning_once(UNKNOWN)
            return False
        return True

    def _kernel(self, tokens: int, page: int) -> Any:
        """The kernel for a number of tokens; None where it would be slow, or cannot be compiled now."""
        if tokens > MOST:
            tokens = min(most for most in wide_layout.WIDTHS if most >= tokens)
        if tokens not in self._kernels and not torch.cuda.is_current_stream_capturing():
            self._kernels[tokens] = self._built(tokens, page)
        return self._kernels.get(tokens)

    def _built(self, tokens: int, page: int) -> Any:
        from selfspec_cli.vllm_plugin.fused_step.launch import Kernel, built
        from selfspec_cli.vllm_plugin.vllm_names import envs, init_logger

        properties: Any = torch.cuda.get_device_properties(self._device)
        shared = int(properties.shared_memory_per_block_optin)
        try:
            shape, blocks = replace(self.shape, page=page), len(self.plan.blocks)
            build: Any = (
                built(shape, self.plan, tokens, shared)
                if tokens <= MOST
                else wide_layout.built(shape, blocks, tokens, shared)
            )
            kernel = Kernel(build, self._device, Path(envs.VLLM_CACHE_ROOT) / "selfspec")
            if kernel.spilled <= (FEW_SPILLED if tokens <= MOST else FEW_SPILLED_WIDE):
                return kernel
            reason = f"a thread has {kernel.spilled} bytes more than registers"
        except (ValueError, RuntimeError) as error:
            reason = str(error)
        logger = init_logger("vllm.selfspec")
        logger.warning("draft step: kernels for single products at %d tokens, because %s", tokens, reason)
        return None

    def _addresses(self) -> Tensor | None:
        """Where each layer's KV cache begins, int64 [layers].

        None where layers differ in their caches or metadata, or a graph would record addresses not known before.
        """
        from selfspec_cli.vllm_plugin.vllm_names import get_forward_context

        context = get_forward_context()
        caches = [context.no_compile_layers[name].kv_cache for name in self._names]
        found = context.attn_metadata
        alike = isinstance(found, dict) and all(one.stride() == caches[0].stride() for one in caches)
        if not alike or not all(found[name] is found[self._names[0]] for name in self._names):
            return None  # layers of several kinds of cache
        addresses = tuple(one.data_ptr() for one in caches)
        if addresses not in self._caches and not torch.cuda.is_current_stream_capturing():
            self._caches[addresses] = torch.tensor(addresses, device=self._device)  # graphs go on reading it
        return self._caches.get(addresses)


def stacked(layers: list[Any]) -> dict[str, Tensor | None]:
    """Small weights of all layers one after the other: norms [layers, 2, hidden], the bias of queries, keys and values
    [layers, outputs], norms of heads [layers, 2, head size]; None for what the model does not have."""
    attentions = [layer.self_attn for layer in layers]
    biases = [one.qkv_proj.bias for one in attentions if one.qkv_proj.bias is not None]
    heads = [torch.stack([norm.weight for norm in head_norms_of(one)]) for one in attentions if head_norms_of(one)]
    norms = [torch.stack([one.input_layernorm.weight, one.post_attention_layernorm.weight]) for one in layers]
    return {
        "norms": torch.stack(norms),
        "bias": torch.stack(biases) if biases else None,
        "head_norms": torch.stack(heads) if heads else None,
    }


def stream_of(layers: list[Any], shape: Shape, plan: Plan, device: torch.device) -> Stream:
    """The copies of all layers as the kernel for few tokens reads them."""
    stream = Stream(shape, plan, device)
    fill(stream, layers)
    return stream


def wide_stream_of(layers: list[Any], shape: Shape, blocks: int, device: torch.device) -> wide_layout.Stream | None:
    """The copies of all layers as the kernel for many tokens reads them; None for a shape that it has no room for."""
    try:
        stream = wide_layout.Stream(wide_layout.built(shape, blocks, min(wide_layout.WIDTHS)), device)
    except ValueError:
        return None
    fill(stream, layers)
    return stream


def fill(stream: Stream | wide_layout.Stream, layers: list[Any]) -> None:
    """Put the copies of now into a stream."""
    for number, layer in enumerate(layers):
        copies = {name: copy_of(linear) for name, linear in linears_of(layer).items()}
        copies["gate_up"] = gate_and_up(copies["gate_up"])
        stream.put(number, {name: records(copy) for name, copy in copies.items()})
