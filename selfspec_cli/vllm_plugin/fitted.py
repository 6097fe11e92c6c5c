"""From a finished collection to files: solve, evaluate, save with all that is known about the fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from selfspec_cli.early_exit.artifact import HeadMetadata, head_filename, save_head
from selfspec_cli.vllm_plugin.collect import Collector, FittedHead
from selfspec_cli.vllm_plugin.exit_head import fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def save_all(model: nn.Module, vllm_config: VllmConfig, folder: str, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Fit and save every head that `model`'s collector was asked for; one plain report a head, the lens included."""
    tap: Any = model.early_exit_tap
    collector: Collector = tap.collector
    mark = fingerprint(model, vllm_config)
    reports = []
    for layer in collector.layers:
        for fitted in collector.solve(layer):
            reports.append(_save(fitted, collector, mark, vllm_config, Path(folder), about))
    tap.collector = None
    return reports


def _save(
    fitted: FittedHead,
    collector: Collector,
    mark: str,
    vllm_config: VllmConfig,
    folder: Path,
    about: dict[str, Any],
) -> dict[str, Any]:
    hidden = int(vllm_config.model_config.get_hidden_size())
    itemsize = vllm_config.model_config.dtype.itemsize
    summary: dict[str, Any] = {
        "layer": fitted.layer,
        "kind": fitted.head.kind,
        "agreement": fitted.agreement,
        "tested_on": collector.seen["test"],
        "bytes_per_step": fitted.head.bytes_per_step(hidden, collector.vocab_size, itemsize),
    }
    if fitted.plan is None or fitted.report is None:
        return summary
    statistics = fitted.report.to_dict() | {"agreement": fitted.agreement, "tested_on": collector.seen["test"]}
    metadata = HeadMetadata(
        kind=fitted.head.kind,
        layer=fitted.layer,
        hidden=hidden,
        vocab_size=collector.vocab_size,
        rank=fitted.head.rank,
        fingerprint=mark,
        target=fitted.plan.sums[1],
        pairs=fitted.report.pairs,
        ridge=fitted.report.ridge,
        fit=statistics,
        **about,
    )
    path = save_head(folder / head_filename(fitted.head.kind, fitted.layer, fitted.head.rank), fitted.head, metadata)
    return summary | statistics | {"target": fitted.plan.sums[1], "path": str(path)}
