"""Fit exit heads for one model: stream text through it, solve in closed form, save.

Fitted on the standard library's modules that are not held out; the ridge is chosen on other windows of the same text,
and the agreement reported is measured on the held-out modules.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfspec_cli import corpus, provenance
from selfspec_cli.config import ConfigError, Method, RunConfig
from selfspec_cli.engine import Engine, count_layers, open_engine
from selfspec_cli.paths import head_folder
from selfspec_cli.progress import Progress, ignore

WINDOW = 512  # tokens a prompt
CHUNK = 16  # prompts handed over at once; the progress bar's step
HELD_OUT_PAIRS = 4096  # for validation, and again for the test


@dataclass
class FitResult:
    """What was fitted. reports: one a head, the lens of each layer first. seconds: from the engine's start on."""

    reports: list[dict[str, Any]]
    seconds: float
    collect_seconds: float
    solve_seconds: float


def run(
    cfg: RunConfig,
    *,
    layers: Sequence[int],
    pairs: int = 50_000,
    heads: Sequence[dict[str, Any]] = ({"kind": "lsq"},),
    progress: Progress = ignore,
) -> FitResult:
    """Fit `heads` (fields of `vllm_plugin.collect.HeadPlan`) at `layers` on `pairs` (hidden state, target) pairs.

    Raises:
        ConfigError: a layer outside 1..L-1, or fewer than one pair.
    """
    total = count_layers(cfg.model)
    for layer in layers:
        if not 1 <= layer < total:
            raise ConfigError(f"layer={layer}: must be 1 to {total - 1} (the model has {total} layers)")
    if pairs < 1:
        raise ConfigError(f"pairs={pairs}: must be at least 1")
    plain = replace(cfg, method=Method.baseline)
    extra = {"additional_config": {"selfspec_collect": sorted(set(layers))}, "enforce_eager": True}
    start = time.perf_counter()
    with open_engine(plain, **extra) as engine:
        wanted = {"fit": pairs, "validate": HELD_OUT_PAIRS, "test": HELD_OUT_PAIRS}
        engine.call("early_exit_collect", [dict(head) for head in heads], wanted)
        ready = time.perf_counter()
        # Windows may overlap; another seed begins them elsewhere.
        _stream(engine, "fit", corpus.fitting_text(), pairs, cfg.seed, progress)
        _stream(engine, "validate", corpus.fitting_text(), HELD_OUT_PAIRS, cfg.seed + 1, progress)
        _stream(engine, "test", corpus.held_out_text(), HELD_OUT_PAIRS, cfg.seed, progress)
        collected = time.perf_counter()
        about = {"corpus": "standard library, held-out modules excluded", "versions": provenance.versions()}
        reports = engine.call("early_exit_fit", str(Path(head_folder(cfg)).absolute()), about)
        solved = time.perf_counter()
    return FitResult(reports, solved - start, collected - ready, solved - collected)


def _stream(engine: Engine, mode: str, texts: list[tuple[str, str]], pairs: int, seed: int, progress: Progress) -> None:
    """Run prompts through the model until the worker has `pairs` pairs for `mode`."""
    engine.call("early_exit_collect_mode", mode)
    length = min(WINDOW, engine.max_model_len - 1)
    # Chunked prefill may split a prompt and lose the pair at the seam; a few windows more make up for it.
    windows = corpus.token_windows(engine.encode, texts, length, -(-pairs // (length - 1)) + 2, seed)
    for start in range(0, len(windows), CHUNK):
        engine.generate(windows[start : start + CHUNK], 1, batch=CHUNK)
        done = engine.call("early_exit_collected")[mode]
        progress(mode, done, pairs)
        if done >= pairs:
            return
    if engine.call("early_exit_collected")[mode] < pairs:
        raise ConfigError(f"the text gave only {engine.call('early_exit_collected')[mode]} of {pairs} pairs")
