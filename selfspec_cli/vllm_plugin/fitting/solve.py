"""From a finished collection to files: solve, test as served, save with all that is known about the fit."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfspec_cli.early_exit.artifact import save_head
from selfspec_cli.early_exit.equations import FitReport
from selfspec_cli.early_exit.fitting import HeadScale
from selfspec_cli.early_exit.head_metadata import HeadMetadata, head_filename
from selfspec_cli.early_exit.head_module import ExitHead, with_draft_vocabulary
from selfspec_cli.early_exit.head_spec import HeadSpec
from selfspec_cli.vllm_plugin.exit_head import TargetHead, embedding, fingerprint
from selfspec_cli.vllm_plugin.fitting.collect import PIECE, Collector, Held

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import VllmConfig


def save_all(
    model: nn.Module,
    vllm_config: VllmConfig,
    folder: str,
    about: dict[str, Any],
    vocabularies: Mapping[str, list[int]],
) -> list[dict[str, Any]]:
    """Fit, test and save every head that `model`'s collector was asked for; one plain report a head and vocabulary.

    The arguments are those of `EarlyExitWorker.early_exit_fit`. On tensor-parallel ranks the first one writes.
    """
    tap: Any = model.early_exit_tap
    collector: Collector = tap.collector
    mark = fingerprint(model, vllm_config)
    device = embedding(model).device
    over: dict[str | None, Tensor | None] = {None: None}
    over |= {tag: torch.tensor(ids, device=device) for tag, ids in vocabularies.items()}
    reports = []
    for layer, spec, solved, report in _solved(collector):
        full, scale = collector.scaled(layer, spec, solved)
        for tag, ids in over.items():
            head = full if ids is None else with_draft_vocabulary(full, ids)
            summary = {"layer": layer, "head": spec.name, "kind": spec.kind, "vocab": tag or "full"}
            summary |= _tested(head, collector, layer, model, vllm_config)
            if report is not None or tag is not None:
                facts = _metadata(collector, vllm_config, layer, spec, report, summary | scale, tag)
                path = Path(folder) / head_filename(spec, layer, tag)
                if vllm_config.parallel_config.rank == 0:
                    save_head(path, head, HeadMetadata(**facts, fingerprint=mark, **about))
                summary |= facts["fit"] | {"target": facts["target"], "path": str(path)}
            reports.append(summary)
    tap.collector = None
    return reports


def _solved(collector: Collector) -> Iterator[tuple[int, HeadSpec, ExitHead, FitReport | None]]:
    for layer in collector.layers:
        for spec in collector.plan.specs:
            yield layer, spec, *collector.solve(layer, spec)


def _tested(
    head: ExitHead, collector: Collector, layer: int, model: nn.Module, vllm_config: VllmConfig
) -> dict[str, Any]:
    """How often the head, in the dtype and by the path that serve it, drafts on held-out text what the full model
    says."""
    served = copy.deepcopy(head).to(embedding(model).device, collector.dtype)
    bound = TargetHead(served, model, collector.vocab_size, vllm_config)

    def draft(x: Tensor) -> Tensor:
        return bound.to_full_ids(bound.logits(x)[:, : bound.draft_vocab_size].argmax(-1))

    @torch.inference_mode()
    def agreed(held: Held) -> list[bool]:
        parts = [draft(x) for x in held.x[layer].split(PIECE)]
        return (torch.cat(parts) == held.best).tolist()

    test = [bit for held in collector.kept["test"] for bit in agreed(held)]
    hidden = int(vllm_config.model_config.get_hidden_size())
    found: dict[str, Any] = {
        "agreement": sum(test) / len(test),
        "tested_on": len(test),
        "bytes_per_step": head.bytes_per_step(hidden, collector.vocab_size, collector.dtype.itemsize),
        "parameters": sum(weight.numel() for weight in head.parameters()),
    }
    return found


def _metadata(
    collector: Collector,
    vllm_config: VllmConfig,
    layer: int,
    spec: HeadSpec,
    report: FitReport | None,
    summary: dict[str, Any],
    tag: str | None,
) -> dict[str, Any]:
    """The fields of `HeadMetadata` that are not the model's name nor the data's."""
    fit = {} if report is None else report.to_dict()
    own = ("agreement", "tested_on", *(field.name for field in fields(HeadScale)))
    fit |= {name: summary[name] for name in own if name in summary}
    return {
        "kind": spec.kind,
        "layer": layer,
        "hidden": int(vllm_config.model_config.get_hidden_size()),
        "vocab_size": collector.vocab_size,
        "rank": spec.rank,
        "bias": spec.bias,
        "draft_vocab": tag,
        "target": spec.target,
        "pairs": None if report is None else report.pairs,
        "ridge": None if report is None else report.ridge,
        "fit": fit,
    }
