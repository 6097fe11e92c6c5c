"""Settings of the draft's kernels for a model's shape, measured on the GPU at hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfspec_cli.config import facts
from selfspec_cli.config.schema import ConfigError, RunConfig, vocab_size
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.vllm_plugin import kernel_choice

if TYPE_CHECKING:
    import torch

    from selfspec_cli.vllm_plugin.kernel_timing import Clock

TOKENS, CONTEXTS = "1,2,4,8,16,32", "1024,4096,32768"
MOST = 32  # tokens; more are multiplied by the target's own weights
WITHIN = 1.03  # of the best, what a usual setting should be
JOBS = 16  # processes that compile, at most
Say = Callable[[dict[str, Any]], None]


def shape_of(cfg: RunConfig) -> kernel_choice.DraftShape:
    """What the drafts of `cfg` multiply and attend to, by its model's config.json.

    Raises:
        ConfigError: the kernels of its draft weights have nothing to choose, or its layers are not as Llama's.
    """
    kind = DRAFT_WEIGHTS[cfg.draft_weights]
    width = getattr(kind, "width", None)
    if kind.kernels is None or width is None:
        tunable = [name for name, one in DRAFT_WEIGHTS.items() if hasattr(one, "width") and one.kernels is not None]
        raise ConfigError(
            f"draft_weights={cfg.draft_weights}: tune-kernels chooses settings of kernels for integer "
            f"copies; allowed: {', '.join(tunable)}"
        )
    if facts.model_facts(cfg, fetch=True).is_moe:
        raise ConfigError(
            f"model={cfg.model.path}: its experts are multiplied by vLLM's kernels, which have settings "
            "of vLLM's; tune-kernels is for models without experts"
        )
    file = facts.config_file(cfg.model, fetch=True)
    document = {} if file is None else facts.config_document(file)
    text = document | (document.get("text_config") or {}) | cfg.model.hf_overrides
    try:
        shape = kernel_choice.DraftShape.of(text, width, cfg.model.tensor_parallel_size, vocab_size(cfg))
    except KeyError as error:
        key = error.args[0]
        raise ConfigError(
            f"model={cfg.model.path}: its config.json does not say {key}; tune-kernels knows layers as "
            f"Llama's; say it with model.hf_overrides.{key}=NUMBER"
        ) from error
    odd = next((name for name, (_, columns) in shape.products.items() if columns % 64), None)
    if odd is not None:
        raise ConfigError(
            f"model={cfg.model.path}: rows of {odd} have {shape.products[odd][1]} values, and copies "
            "are in groups of 64"
        )
    return shape


def check(tokens: Sequence[int], contexts: Sequence[int]) -> None:
    """Raises ConfigError for what a draft step cannot have, and for none at all."""
    wrong = next((count for count in tokens if count > MOST), None)
    if wrong is not None:
        raise ConfigError(f"--tokens {wrong} is out of range; allowed: 1 to {MOST}")
    for option, values in (("--tokens", tokens), ("--contexts", contexts)):
        if not values:
            raise ConfigError(f"{option} names no number; write them as 1,8,32")


def device() -> tuple[torch.device, str]:
    """The GPU to measure on, and its name.

    Raises:
        ConfigError: none can be seen here.
    """
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise ConfigError("tune-kernels times kernels on an NVIDIA GPU, and none can be seen here")
    return torch.device("cuda"), torch.cuda.get_device_name()


def run(
    shape: kernel_choice.DraftShape,
    tokens: Sequence[int],
    contexts: Sequence[int],
    out: Path | None,
    *,
    on: torch.device,
    name: str,
    say: Say,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Measure, and write the file after each row; the document that a command shows.

    Args:
        out: the file; None: where an engine on this GPU looks for it.
        on: the device. name: of the GPU, by which an engine finds the file.
        say: is given each row as it is measured.
        clock: in place of CUDA's (`kernel_timing.captured`).
    """
    from selfspec_cli.vllm_plugin import kernel_timing

    path = out or kernel_choice.path_for(name, shape)
    cases = kernel_timing.cases_of(shape, tokens, contexts)
    if on.type == "cuda":
        kernel_timing.compile_all(cases, min(JOBS, len(os.sched_getaffinity(0))))
    rows: list[dict[str, Any]] = []
    for row in kernel_timing.tuned(cases, on, clock or kernel_timing.captured):
        rows.append(row)
        say(row)
        kernel_choice.write(path, name, shape, [one for one in rows if "setting" in one])
    return {"device": name, "file": str(path), "read_by_engines": out is None, "rows": rows} | summary(rows)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many usual settings are within 3 % of the best, and how far the worst is."""
    shares = [row["usual_over_best"] for row in rows if "setting" in row]
    return {
        "within": sum(share <= WITHIN for share in shares),
        "measured": len(shares),
        "worst": max(shares, default=None),
    }
