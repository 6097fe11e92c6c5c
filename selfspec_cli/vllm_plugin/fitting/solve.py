"""From a finished collection to files: solve, test as served, save with all that is known about the fit."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfspec_cli.early_exit.artifact import save_head
from selfspec_cli.early_exit.equations import FitReport
from selfspec_cli.early_exit.fitting import tokens_a_round
from selfspec_cli.early_exit.head_metadata import HeadMetadata, head_filename
from selfspec_cli.early_exit.head_module import ExitHead, with_draft_vocabulary
from selfspec_cli.early_exit.head_scale import HeadScale
from selfspec_cli.early_exit.head_spec import HeadSpec
from selfspec_cli.vllm_plugin.exit_head import TargetHead, embedding, fingerprint
from selfspec_cli.vllm_plugin.fitting.collect import PIECE, Collector, Held

if TYPE_CHECKING:
    from selfspec_cli.vllm_plugin.vllm_names import VllmConfig

CALLS, REPEATS = 20, 5  # of what is timed
DRAFT_LENGTHS = range(1, 9)  # k for which the tokens a round are reported


def save_all(
    model: nn.Module,
    vllm_config: VllmConfig,
    folder: str,
    about: dict[str, Any],
    vocabularies: Mapping[str, list[int]],
    timed: int | None = None,
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
            summary |= _tested(head, collector, layer, model, vllm_config, timed)
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
    head: ExitHead, collector: Collector, layer: int, model: nn.Module, vllm_config: VllmConfig, timed: int | None
) -> dict[str, Any]:
    """How often the head, in the dtype and by the path that serve it, drafts what the full model says.

    agreement: on held-out text. agreement_generated, tokens_k1 ... tokens_k8: on the full model's own generations, None
    without a replay. head_us: microseconds of one step on `timed` states.
    """
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
    if replayed := [sequence for held in collector.kept.get("replay", []) for sequence in _cut(held, agreed(held))]:
        bits = [bit for sequence in replayed for bit in sequence]
        found["agreement_generated"] = sum(bits) / len(bits)
        found |= {f"tokens_k{k}": tokens_a_round(replayed, k) for k in DRAFT_LENGTHS}
    if timed is not None:
        x = collector.kept["test"][0].x[layer][:timed].contiguous()
        found["head_us"] = 1e6 * seconds_a_call(lambda: draft(x), x.device)
    return found


def _cut(held: Held, bits: list[bool]) -> Iterator[list[bool]]:
    """The bits of a forward pass as one list a request: a request ends where positions do not go on."""
    positions = held.positions.tolist()
    starts = [i for i in range(len(positions)) if i == 0 or positions[i] != positions[i - 1] + 1]
    for start, end in zip(starts, [*starts[1:], len(positions)], strict=True):
        yield bits[start:end]


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


@torch.inference_mode()
def seconds_a_call(work: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of one call of `work` over repeats of 20 calls, after a warm-up.

    On CUDA the calls are replayed as one CUDA graph, as a draft loop is, and timed by events: what the host needs to
    launch them is not in it.
    """
    for _ in range(3):
        work()
    if device.type == "cuda":
        return _replayed(work)
    samples = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            work()
        samples.append((time.perf_counter() - start) / CALLS)
    return statistics.median(samples)


def _replayed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            work()
    samples = []
    for _ in range(REPEATS + 1):  # the first replay uploads the graph
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1000 / CALLS)
    return statistics.median(samples[1:])
