"""One or several runs of `selfspec verify`: the arm's engine first, then the plain one, which judges.

The order lets the plain engine be asked about what the arm has done, and needs the memory of one engine at a time.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from selfspec_cli.artifacts.whole import written
from selfspec_cli.config import machine
from selfspec_cli.config.facts import device_of, exit_layer, longest_request, needed
from selfspec_cli.config.keys import Keys, baseline_of
from selfspec_cli.config.schema import SPECULATIVE, ConfigError, Method, RunConfig, to_plain
from selfspec_cli.engine.live import Engine
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import quality
from selfspec_cli.record.folder import new_run_id, now
from selfspec_cli.stages.verify import arm, cases, greedy, plain, sampling, verdict
from selfspec_cli.stages.verify.arm import FOREIGN_HEAD, Wanted
from selfspec_cli.stages.verify.greedy import Difference
from selfspec_cli.stages.verify.verdict import FAULT, NEAR_TIES

FAULTY_WORKER = "selfspec_cli.vllm_plugin.planted.worker.FaultyWorker"
CONTEXT, THOROUGH_CONTEXT, BUDGET = 512, 1024, 256  # tokens, where the user names no context
OpenEngine = Callable[..., AbstractContextManager[Engine]]


def check(cfg: RunConfig, wanted: Wanted) -> None:
    """Refuse what cannot be verified, before an engine starts; raises ConfigError."""
    if cfg.method not in SPECULATIVE:
        why = {Method.skip: "it does not verify its drafts, so its output is not the model's",
               Method.baseline: "it drafts nothing, and is what the others are compared with"}[cfg.method]  # fmt: skip
        raise ConfigError(f"method={cfg.method}: {why}; allowed: {', '.join(SPECULATIVE)}")
    if cfg.acceptance_length is not None:
        raise ConfigError(f"acceptance_length={cfg.acceptance_length}: synthetic acceptance changes the output by "
                          "design; leave it out")  # fmt: skip
    if wanted.batch_invariant and device_of(cfg) != "cuda":
        raise ConfigError("--batch-invariant: vLLM has batch-invariant kernels on CUDA only; on the CPU use float32, "
                          "whose rounding is too small to matter")  # fmt: skip
    if wanted.plant is not None and cfg.method is not Method.layer_skip:
        raise ConfigError(f"--plant {wanted.plant}: faults are planted in drafting with the model's own layers; "
                          "method=layer_skip")  # fmt: skip


def engine_config(cfg: RunConfig, wanted: Wanted) -> RunConfig:
    """`cfg` with an engine on which the cases can happen: prefix caching, a small token budget (so that prompts are
    cut), and a context that is soon full unless the user has named one."""
    engine, model = cfg.engine, cfg.model
    most = THOROUGH_CONTEXT if wanted.thorough else CONTEXT
    budget = max(BUDGET, engine.max_num_seqs * (int(cfg.k or 0) + 1))
    context = model.max_model_len or min(longest_request(cfg) or most, most)
    extra = {"max_logprobs": sampling.EXACT_VOCABULARY} | dict(engine.extra)
    return replace(
        cfg,
        engine=replace(engine, enable_prefix_caching=True, max_num_batched_tokens=budget, extra=extra),
        model=replace(model, max_model_len=context),
    )


def plan(cfg: RunConfig, wanted: Wanted) -> dict[str, Any]:
    """What a run would do; starts no engine."""
    settings = engine_config(cfg, wanted)
    engines = ["the arm", "the same without drafts", "where tokens are level: the same, k + 1 tokens at a time"]
    return {
        "dry_run": True,
        "key": Keys().run(cfg),
        "engines": engines,
        "context": settings.model.max_model_len,
        "cases": ["mixed", *wanted.only] if wanted.only else list(cases.GROUPS),
        "sampling": wanted.settings,
        "runs": wanted.repeat,
    }


def run(cfg: RunConfig, wanted: Wanted, *, open_engine: OpenEngine, progress: Progress = ignore) -> dict[str, Any]:
    """Verify one arm; the document, also written to results_dir (see `save`).

    Raises:
        ConfigError: what `check` refuses.
    """
    check(cfg, wanted)
    start, keys = time.perf_counter(), Keys()
    about: dict[str, Any] = {"key": keys.run(cfg), "arm_key": keys.arm(cfg), "device": keys.device(cfg)}
    settings = engine_config(cfg, wanted)
    seeds = [cfg.seed + number for number in range(wanted.repeat)]
    with _with_foreign_head(settings, wanted) as drafting:
        done = []
        with open_engine(drafting, **_arm_arguments(drafting, wanted)) as engine:
            for seed in seeds:
                done.append(arm.perform(engine, drafting, wanted, seed))
                progress("the arm", len(done), len(seeds))
            layer = engine.layer
        found: list[tuple[dict[str, Any], list[Difference]]] = []
        with open_engine(baseline_of(settings)) as engine:
            for one in done:
                found.append(plain.judge(engine, drafting, wanted, one))
                progress("the plain engine", len(found), len(seeds))
    tolerance = plain.tolerance_of(settings, wanted)
    level = [difference for _, differences in found for difference in differences][:16]
    if level:
        chunk = int(cfg.k or 0) + 1
        with open_engine(baseline_of(settings), long_prefill_token_threshold=chunk) as engine:
            greedy.ask_together(engine, level, chunk, tolerance)
    about |= {"model": cfg.model.name, "layer": layer, "k": cfg.k, "config": to_plain(cfg), "time": now()}
    about |= {"versions": machine.versions(), "planted": wanted.plant, "thorough": wanted.thorough}
    about |= {"batch_invariant": wanted.batch_invariant, "tolerance": tolerance}
    document = finished([one for one, _ in found], wanted.batch_invariant) | about
    document["seconds"] = round(time.perf_counter() - start, 1)
    return save(document, Path(cfg.results_dir))


def finished(found: list[dict[str, Any]], batch_invariant: bool) -> dict[str, Any]:
    """The document of the worst of several runs, with the verdicts of all.

    A difference may have been judged again since its case was: what is a near-tie when tokens come together is one.
    """
    for document in found:
        for row in document["cases"]:
            kinds = [one.kind for one in row["differences"]]
            row["near_ties"] = kinds.count("near-tie")
            if row["verdict"] == FAULT and row["note"] is None and "fault" not in kinds and not batch_invariant:
                row["verdict"] = NEAR_TIES
            row["differences"] = [one.to_dict() for one in row["differences"][:8]]
        document["verdict"], document["reason"] = verdict.decide(document)
        document["suspect"] = verdict.suspect(document) if document["verdict"] == FAULT else None
    last = verdict.worst([document["verdict"] for document in found])
    chosen = next(document for document in found if document["verdict"] == last)
    counts = {name: sum(one["verdict"] == name for one in found) for name in {one["verdict"] for one in found}}
    return chosen | {"runs": len(found), "verdicts": counts}


def save(document: dict[str, Any], results: Path) -> dict[str, Any]:
    """Write a document among the findings of its arm, where reports look for it; one of a planted fault says nothing of
    the arm and goes to verify/. Returns the document with its `file`."""
    run_id = new_run_id()
    file = results / quality.FOLDER / f"{quality.VERDICT}-{document['arm_key']}-{run_id}.json"
    if document["planted"] is not None:
        file = results / "verify" / f"planted-{document['planted']}-{run_id}.json"
    with written(file) as part:
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document | {"file": str(file)}


def _arm_arguments(cfg: RunConfig, wanted: Wanted) -> dict[str, Any]:
    more: dict[str, Any] = {"worker_extension_cls": FAULTY_WORKER}
    if wanted.probabilistic:
        from selfspec_cli.engine.arguments import speculative_config

        spec = speculative_config(cfg, Path(cfg.results_dir))
        more["speculative_config"] = (spec or {}) | {"draft_sample_method": "probabilistic"}
    return more


@contextmanager
def _with_foreign_head(cfg: RunConfig, wanted: Wanted) -> Iterator[RunConfig]:
    """`cfg`; where that fault is to be planted, with a head whose file claims to agree with the model and whose weights
    are not for it. A file that says which model it was fitted on would be refused when it is loaded."""
    if wanted.plant != FOREIGN_HEAD:
        yield cfg
        return
    import torch

    from selfspec_cli.early_exit.artifact import save_head
    from selfspec_cli.early_exit.head_metadata import LEGACY_KIND, HeadMetadata
    from selfspec_cli.early_exit.head_module import ExitHead

    layer, hidden, size = exit_layer(cfg), needed(cfg, "hidden"), needed(cfg, "vocab_size")
    assert layer is not None
    weight = torch.randn(size, hidden, generator=torch.Generator().manual_seed(0)) * hidden**-0.5
    metadata = HeadMetadata(LEGACY_KIND, layer, hidden, size, target="next_token", fit={"agreement": 0.9})
    with tempfile.TemporaryDirectory(prefix="selfspec-") as folder:
        path = save_head(Path(folder) / "foreign.safetensors", ExitHead(LEGACY_KIND, {"weight": weight}), metadata)
        yield replace(cfg, head=replace(cfg.head, kind=LEGACY_KIND, path=str(path)), vocab="full")
