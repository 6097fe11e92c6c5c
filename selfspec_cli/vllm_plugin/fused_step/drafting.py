"""The layers that draft as one kernel, where a model is one that the kernel knows.

There are two such kernels, for up to MOST tokens and for up to MOST_WIDE, and both read the same copies. The engine's
graphs are for one number of tokens each, so the choice between them and the kernels for single products falls when a
graph records a step. Only drafts are computed so: the verify pass decides, on kernels of vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.fused_step.launch import Arguments, Kernel, WideArguments, built, pointer
from selfspec_cli.vllm_plugin.fused_step.layout import RECORD, Shape, gate_and_up, layer_of, planned, records
from selfspec_cli.vllm_plugin.fused_step.models import (
    WARPS,
    Copied,
    copy_of,
    head_norms_of,
    linears_of,
    reason_against,
    shape_of,
)
from selfspec_cli.vllm_plugin.fused_step.wide import layout as wide_layout

MOST = 8  # tokens of the kernel that passes each activation with a flag
MOST_WIDE = max(wide_layout.WIDTHS)  # of the one that waits for counters
EVENLY = 0.5
"""See `layout.planned`."""
FEW_SPILLED = 16  # bytes of a thread: numbers that are read a few times a layer. With 128 a step took a quarter longer.
FEW_SPILLED_WIDE = 64  # none of them is in a loop of products, by the machine code of the shapes in experiments/kernels
UNKNOWN = "draft step: kernels for single products, because the KV cache or its tables are laid out otherwise"
LOG2_E = 1.4426950408889634


def fused_step(
    decoder: Any, layers: Sequence[Any], copied: Copied, vllm_config: vllm.VllmConfig, device: torch.device, alone: bool
) -> FusedStep | None:
    """The kernel for the layers of a decoder that draft, or None where it cannot be had. The log says which, and why.
    alone: nothing else is to hold copies of these layers, so None too where some number of tokens has no kernel."""
    logger = vllm.init_logger("vllm.selfspec")
    reason = reason_against(decoder, layers, copied, vllm_config, device)
    if reason is not None:
        logger.info_once("draft step: kernels for single products, because %s", reason)
        return None
    page, requests = vllm_config.cache_config.block_size, vllm_config.scheduler_config.max_num_seqs
    if alone and not every_step_has_a_kernel(shape_of(layers, page), device, requests):
        return None
    made = FusedStep(decoder, layers, copied, page, device)
    if alone and not all(made.compiled(tokens, page) for tokens in {min(requests, MOST), min(requests, made.most)}):
        return None  # the log says why
    logger.info_once(
        "draft step: one kernel for %d layers, up to %d tokens; its copies of the layers take %.2f GB%s",
        made.shape.layers,
        made.most,
        made.copies.numel() / 1e9,
        "" if alone else " more",
    )
    return made


def every_step_has_a_kernel(shape: Shape, device: torch.device, requests: int) -> bool:
    """Whether steps of 1 to `requests` tokens, or to MOST_WIDE, have room on a device."""
    if all(has_room(most, shape, device) for most in wide_layout.WIDTHS if requests > most - 16):
        return True
    return requests <= MOST and all(has_room(tokens, shape, device) for tokens in range(1, requests + 1))


def has_room(tokens: int, shape: Shape, device: torch.device) -> bool:
    """Whether a device has room for the kernel for up to MOST tokens, or for that for one of the widths of many."""
    try:
        build_for(tokens, shape, device)
    except ValueError:
        return False
    return True


def build_for(tokens: int, shape: Shape, device: torch.device) -> Any:
    """What is compiled for up to MOST tokens, or for one of the widths of many. Raises ValueError without room."""
    properties: Any = torch.cuda.get_device_properties(device)
    blocks, shared = properties.multi_processor_count, int(properties.shared_memory_per_block_optin)
    if tokens <= MOST:
        return built(shape, planned(shape, blocks, WARPS, EVENLY), tokens, shared)
    return wide_layout.built(shape, blocks, tokens, shared)


class FusedStep:
    """The weights of layers as both kernels read them, and the kernel for each number of tokens that was asked for.
    copied: kept, to follow weights that are replaced."""

    def __init__(self, decoder: Any, layers: Sequence[Any], copied: Copied, page: int, device: torch.device) -> None:
        self._layers, self._copied = layers, copied
        attentions = [layer.self_attn for layer in layers]
        self.shape, self._device = shape_of(layers, page), device
        blocks = torch.cuda.get_device_properties(device).multi_processor_count
        size = (self.shape.layers, self.shape.records, RECORD)
        self.copies = torch.empty(size, dtype=torch.uint8, device=device)
        """As `layer_of` lays out each layer."""
        self.most = MOST_WIDE if has_room(min(wide_layout.WIDTHS), self.shape, device) else MOST
        """Most tokens of a step."""
        self.fill()
        self._names = [attention.attn.layer_name for attention in attentions]
        self._scale = float(attentions[0].scaling) * LOG2_E
        self._tensors: dict[str, Tensor | None] = {
            **stacked(layers),
            "final_norm": decoder.norm.weight,
            "embedding": decoder.embed_tokens.weight,
            "rope": attentions[0].rotary_emb.cos_sin_cache,
        }
        self._plan = planned(self.shape, blocks, WARPS, EVENLY).tensor().to(device)
        self._kernels: dict[int, Any] = {}  # by the number of tokens, or by the most of a wide build
        self._caches: dict[tuple[int, ...], Tensor] = {}

    @torch.inference_mode()
    def __call__(self, num_tokens: int, buffers: Any) -> Tensor | None:
        """Normed hidden states [num_tokens, hidden] of a draft step on vLLM's input buffers, inside its forward
        context. None where the trunk has to run: for more tokens, without a KV cache, and where a graph would record
        what has not run before."""
        if num_tokens > self.most:
            return None
        metadata, _, cache, slots = vllm.get_attention_context(self._names[0])
        if metadata is None or metadata.max_query_len != 1 or not self._fits(metadata, cache, slots, num_tokens):
            return None
        kernel, caches = self.compiled(num_tokens, cache.shape[2]), self._addresses()
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
        tensors = {**self._tensors, **step, "weights": self.copies}
        pointers = {name: pointer(tensor) for name, tensor in tensors.items()} | numbers
        if isinstance(kernel.build, wide_layout.Build):
            kernel(WideArguments(**pointers, tokens=num_tokens))
        else:
            kernel(Arguments(**pointers, plan=pointer(self._plan)))
        return out

    def read_by_a_step(self) -> list[Tensor]:
        """Weights that a step reads."""
        small = [self._tensors[name] for name in ("norms", "bias", "head_norms", "final_norm")]
        return [self.copies, *(tensor for tensor in small if tensor is not None)]

    @torch.inference_mode()
    def renew(self, copies: bool = True) -> None:
        """Read copies (fitted ones: False), norms and biases anew, into the tensors that CUDA graphs read."""
        if copies:
            self.fill()
        for name, tensor in stacked(self._layers).items():
            mine = self._tensors[name]
            if mine is not None and tensor is not None:
                mine.copy_(tensor)

    def fill(self) -> None:
        """Lay out copies of the current weights, layer by layer, so that only one layer is held twice at a time."""
        for number in range(self.shape.layers):
            self._put(number)

    def _put(self, number: int) -> None:  # a function of its own, after which a layer's copies are let go
        copies = {name: copy_of(linear) for name, linear in linears_of(self._copied(number)).items()}
        copies["gate_up"] = gate_and_up(copies["gate_up"])
        self.copies[number].copy_(layer_of({name: records(copy) for name, copy in copies.items()}))

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
            vllm.init_logger("vllm.selfspec").warning_once(UNKNOWN)
            return False
        return True

    def compiled(self, tokens: int, page: int) -> Any:
        """The kernel for a step of `tokens` tokens; None where each would be slow or cannot be compiled. The wide one
        also takes few tokens for which their own has no room. page: tokens of a block of the KV cache."""
        few = [tokens] if tokens <= MOST else []
        for most in [*few, *[width for width in wide_layout.WIDTHS if tokens <= width <= self.most][:1]]:
            if most not in self._kernels and not torch.cuda.is_current_stream_capturing():
                self._kernels[most] = self._built(most, page)
            if self._kernels.get(most) is not None:
                return self._kernels[most]
        return None

    def _built(self, tokens: int, page: int) -> Any:
        try:
            build = build_for(tokens, replace(self.shape, page=page), self._device)
            kernel = Kernel(build, self._device, Path(vllm.envs.VLLM_CACHE_ROOT) / "selfspec")
            if kernel.spilled <= (FEW_SPILLED if tokens <= MOST else FEW_SPILLED_WIDE):
                return kernel
            reason = f"a thread has {kernel.spilled} bytes more than registers"
        except (ValueError, RuntimeError) as error:
            reason = str(error)
        logger = vllm.init_logger("vllm.selfspec")
        log = logger.info if tokens <= MOST < self.most else logger.warning  # the kernel for more tokens takes over
        log("draft step: no kernel of its own at %d tokens, because %s", tokens, reason)
        return None

    def _addresses(self) -> Tensor | None:
        """Where each layer's KV cache begins, int64 [layers].
        None where layers differ in their caches or metadata, or a graph would record addresses not known before."""
        context = vllm.get_forward_context()
        caches = [context.no_compile_layers[name].kv_cache for name in self._names]
        found = context.attn_metadata
        alike = isinstance(found, dict) and all(one.stride() == caches[0].stride() for one in caches)
        if not alike or not all(found[name] is found[self._names[0]] for name in self._names):
            return None  # layers of several kinds of cache
        addresses = tuple(one.data_ptr() for one in caches)
        if addresses not in self._caches and not torch.cuda.is_current_stream_capturing():
            self._caches[addresses] = torch.tensor(addresses, device=self._device)  # graphs go on reading it
        return self._caches.get(addresses)


def stacked(layers: Sequence[Any]) -> dict[str, Tensor | None]:
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
