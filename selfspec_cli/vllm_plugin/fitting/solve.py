"""From a finished collection to files: solve, test as served, save with all that is known about the fit."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from selfspec_cli.early_exit.artifact import save_head
from selfspec_cli.early_exit.head_metadata import HeadMetadata, head_filename
from selfspec_cli.early_exit.head_module import ExitHead, with_draft_vocabulary
from selfspec_cli.vllm_plugin import vllm_names as vllm
from selfspec_cli.vllm_plugin.exit_head import TargetHead, embedding, fingerprint
from selfspec_cli.vllm_plugin.fitting.collect import PIECE, Collector


def save_all(
    model: nn.Module,
    vllm_config: vllm.VllmConfig,
    folder: str,
    about: dict[str, Any],
    vocabularies: Mapping[str, list[int]],
) -> list[dict[str, Any]]:
    """Fit, test and save every head that `model`'s collector was asked for; one plain report a head and vocabulary.

    The arguments are those of `EarlyExitWorker.early_exit_fit`. On tensor-parallel ranks the first one writes.
    """
    tap: Any = model.early_exit_tap
    collector: Collector = tap.collector
    mark, hidden = fingerprint(model, vllm_config), int(vllm_config.model_config.get_hidden_size())
    device = embedding(model).device
    over: dict[str | None, Tensor | None] = {None: None}
    over |= {tag: torch.tensor(ids, device=device) for tag, ids in vocabularies.items()}
    reports = []
    for layer, spec in itertools.product(collector.layers, collector.specs):
        solved, report = collector.solve(layer, spec)
        full, scale = collector.scaled(layer, spec, solved)
        for tag, ids in over.items():
            head = full if ids is None else with_draft_vocabulary(full, ids)
            tested = _tested(head, collector, layer, model, vllm_config)
            summary = {"layer": layer, "head": spec.name, "kind": spec.kind, "vocab": tag or "full", **tested}
            if report is not None or tag is not None:
                fit = {} if report is None else report.to_dict()
                fit |= {"agreement": tested["agreement"], "tested_on": tested["tested_on"], **scale}
                path = Path(folder) / head_filename(spec, layer, tag)
                metadata = HeadMetadata(
                    kind=spec.kind,
                    layer=layer,
                    hidden=hidden,
                    vocab_size=collector.vocab_size,
                    rank=spec.rank,
                    bias=spec.bias,
                    draft_vocab=tag,
                    target=spec.target,
                    pairs=None if report is None else report.pairs,
                    ridge=None if report is None else report.ridge,
                    fit=fit,
                    fingerprint=mark,
                    **about,
                )
                if vllm_config.parallel_config.rank == 0:
                    save_head(path, head, metadata)
                summary |= fit | {"target": spec.target, "path": str(path)}
            reports.append(summary)
    tap.collector = None
    return reports


def _tested(
    head: ExitHead, collector: Collector, layer: int, model: nn.Module, vllm_config: vllm.VllmConfig
) -> dict[str, Any]:
    """How often the head, in the dtype and by the path that serve it, drafts on held-out text what the full model
    says."""
    served = copy.deepcopy(head).to(embedding(model).device, collector.dtype)
    bound = TargetHead(served, model, collector.vocab_size, vllm_config)

    def draft(x: Tensor) -> Tensor:
        return bound.to_full_ids(bound.logits(x)[:, : bound.draft_vocab_size].argmax(-1))

    @torch.inference_mode()
    def agreed(best: Tensor, x: Tensor) -> list[bool]:
        return (torch.cat([draft(part) for part in x.split(PIECE)]) == best).tolist()

    test = [bit for best, x in collector.kept["test"] for bit in agreed(best, x[layer])]
    hidden = int(vllm_config.model_config.get_hidden_size())
    return {
        "agreement": sum(test) / len(test),
        "tested_on": len(test),
        "bytes_per_step": head.bytes_per_step(hidden, collector.vocab_size, collector.dtype.itemsize),
        "parameters": sum(weight.numel() for weight in head.parameters()),
    }
