"""One or several runs of `selfspec verify`: the arm's engine first, then the plain one, which judges.

The order lets the plain engine be asked about what the arm has done, and needs the memory of one engine at a time.
"""

import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from selfspec_cli.config import machine
from selfspec_cli.config.facts import device_of, exit_layer, longest_request, needed
from selfspec_cli.config.keys import Keys, baseline_of
from selfspec_cli.config.schema import SPECULATIVE, ConfigError, Method, RunConfig, to_plain
from selfspec_cli.engine.live import OpenEngine
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import quality
from selfspec_cli.record.folder import new_run_id, now
from selfspec_cli.stages.arms import named
from selfspec_cli.stages.verify import engines, greedy, sampling, verdict
from selfspec_cli.stages.verify.engines import EVERY, FOREIGN_HEAD, Arm, Unsure, Wanted
from selfspec_cli.stages.verify.verdict import FAULT, NEAR_TIES
from selfspec_cli.vllm_plugin.wrap import FAULTS_FOLDER
from selfspec_cli.whole import atomic_write

FAULTY_WORKER = "selfspec_cli.vllm_plugin.planted.worker.FaultyWorker"
COMPILATION = "compilation_config"
CONTEXT, THOROUGH_CONTEXT, BUDGET = 512, 1024, 256  # tokens, where the user names no context
TELLING = ("preempted", "gate")  # with mixed and cache: the cases by which faults are told apart


def check(cfg: RunConfig, wanted: Wanted) -> None:
    """Refuse what cannot be verified, before an engine starts; raises ConfigError."""
    if cfg.method not in SPECULATIVE:
        why = {
            Method.skip: "it does not verify its drafts, so its output is not the model's",
            Method.baseline: "it drafts nothing, and is what the others are compared with",
        }[cfg.method]
        raise ConfigError(f"method={cfg.method}: {why}; allowed: {', '.join(SPECULATIVE)}")
    if wanted.plant not in (None, FOREIGN_HEAD, *verdict.PLANTED_FOR_PROOF) and not FAULTS_FOLDER.is_dir():
        raise ConfigError(f"--plant {wanted.plant}: this fault comes with the repository, not with the package")
    if cfg.acceptance_length is not None:
        raise ConfigError(
            f"acceptance_length={cfg.acceptance_length}: synthetic acceptance changes the output by "
            "design; leave it out"
        )
    if cfg.model.load_format == "dummy":
        raise ConfigError(
            "model.load_format=dummy: the random weights that vLLM makes hold all tokens equally likely, "
            "to a millionth, so that no output tells anything; give a model that has weights. For the "
            "shape of Llama 3 8B: python tests/gpu/verify_shapes.py --only llama_8b"
        )
    if wanted.batch_invariant and device_of(cfg) != "cuda":
        raise ConfigError(
            "--batch-invariant: vLLM has batch-invariant kernels on CUDA only; on the CPU use float32, "
            "whose rounding is too small to matter"
        )
    kinds = verdict.kinds_of(cfg.method)
    if wanted.plant not in (None, EVERY, *kinds):
        raise ConfigError(
            f"--plant {wanted.plant} with method={cfg.method}: it is a fault of drafting with the model's own layers, "
            f"method=layer_skip; allowed here: {', '.join(kinds)}, {EVERY}"
        )


def engine_config(cfg: RunConfig, wanted: Wanted) -> RunConfig:
    """`cfg` with an engine on which cases can happen: prefix caching, prompts that are cut, a context soon full."""
    engine, model = cfg.engine, cfg.model
    most = THOROUGH_CONTEXT if wanted.thorough else CONTEXT
    budget = max(BUDGET, engine.max_num_seqs * (int(cfg.k or 0) + 1))
    context = model.max_model_len or min(longest_request(cfg) or most, most)
    # Blocks of the prefix cache are long on a CPU: few would be filled by what was drafted, and looked at again.
    blocks = {"block_size": 32} if device_of(cfg) == "cpu" else {}
    extra = {"max_logprobs": sampling.EXACT_VOCABULARY} | blocks | dict(engine.extra)
    if wanted.batch_invariant:
        extra[COMPILATION] = deterministic(extra.get(COMPILATION))
    return replace(
        cfg,
        engine=replace(engine, enable_prefix_caching=True, max_num_batched_tokens=budget, extra=extra),
        model=replace(model, max_model_len=context),
    )


def deterministic(compilation: int | Mapping[str, Any] | None) -> dict[str, Any]:
    """vLLM's `compilation_config` (a mode, a mapping or None), with Inductor's kernels chosen by rules unless it says
    otherwise. Chosen by timing they can add up in another order at each start of an engine, and in batch-invariant mode
    plain vLLM then differs from itself (pytorch/pytorch#174711, `tests/gpu/test_v2_lossless.py`)."""
    given: dict[str, Any] = {"mode": compilation} if isinstance(compilation, int) else dict(compilation or {})
    return given | {"inductor_compile_config": {"deterministic": True, **given.get("inductor_compile_config", {})}}


def plan(cfg: RunConfig, wanted: Wanted) -> dict[str, Any]:
    """What a run would do; starts no engine."""
    settings = engine_config(cfg, wanted)
    engines = ["the arm", "the same without drafts", "where tokens are level: the same, k + 1 tokens at a time"]
    return {
        "dry_run": True,
        "key": Keys().run(cfg),
        "engines": engines,
        "context": settings.model.max_model_len,
        "cases": ["mixed", *wanted.only] if wanted.only else list(greedy.GROUPS),
        "sampling": wanted.settings,
        "runs": wanted.repeat,
    }


def run(cfg: RunConfig, wanted: Wanted, *, open_engine: OpenEngine, progress: Progress = ignore) -> dict[str, Any]:
    """Verify one arm; the document, also written to results_dir (`save`). Raises ConfigError: what `check` refuses."""
    check(cfg, wanted)
    start = time.perf_counter()
    settings = engine_config(cfg, wanted)
    arms: list[tuple[Arm, Wanted]] = []
    jobs = _jobs(cfg, wanted)
    for foreign in (False, True):
        here = [job for job in jobs if (job[1].plant == FOREIGN_HEAD) == foreign]
        if not here:
            continue
        head = _foreign_head(settings) if foreign else nullcontext(settings)
        with head as drafting, open_engine(drafting, worker_extension_cls=FAULTY_WORKER) as engine:
            for seed, asked in here:
                arms.append((engines.perform(engine, drafting, asked, seed, progress), asked))
                progress("the arm", len(arms), len(jobs))
                if any(drawn.ended is not None for drawn in arms[-1][0].drawn.values()):
                    break  # nothing more can be asked of this engine
            layer = engine.layer
    found: list[tuple[Arm, dict[str, Any], list[Unsure]]] = []
    with open_engine(baseline_of(settings)) as engine:
        for one, asked in arms:
            found.append((one, *engines.judge(engine, settings, asked, one, progress)))
            progress("the plain engine", len(found), len(jobs))
    if any(unsure for _, _, unsure in found):
        # A budget of so many tokens, and one request: vLLM cuts no prompt that is alone by any other setting.
        with open_engine(baseline_of(settings), max_num_batched_tokens=int(cfg.k or 0) + 1, max_num_seqs=1) as engine:
            engines.judge_together(engine, settings, wanted, found)
    planted = [(asked.plant, one) for (_, asked), (_, one, _) in zip(arms, found, strict=True)]
    keys = Keys()
    document = concluded(planted, wanted) | {
        "key": keys.run(cfg),
        "arm_key": keys.arm(cfg),
        "device": keys.device(cfg),
        "arm": named(cfg),
        "model": cfg.model.name,
        "layer": layer,
        "k": cfg.k,
        "config": to_plain(cfg),
        "time": now(),
        "versions": machine.versions(),
        "planted": wanted.plant,
        "thorough": wanted.thorough,
        "batch_invariant": wanted.batch_invariant,
        "tolerance": engines.tolerance_of(settings, wanted),
        "seconds": round(time.perf_counter() - start, 1),
    }
    return save(document, Path(cfg.results_dir))


def _jobs(cfg: RunConfig, wanted: Wanted) -> list[tuple[int, Wanted]]:
    """Each run's seed, and what it is to do. With every fault to be planted there are clean runs, too."""
    seeds = [cfg.seed + number for number in range(wanted.repeat)]
    if wanted.plant != EVERY:
        return [(seed, wanted) for seed in seeds]
    clean = [(seed, replace(wanted, plant=None)) for seed in seeds]
    return clean + [(cfg.seed, telling(wanted, kind)) for kind in verdict.kinds_of(cfg.method)]


def telling(wanted: Wanted, kind: str) -> Wanted:
    """A run with a fault planted and only what tells it from others: sampled texts are needed for one kind alone."""
    size = wanted.size if kind == "biased_sampler" else replace(wanted.size, samples=0)
    return replace(wanted, size=size, plant=kind, only=TELLING, brief=True)


def concluded(found: list[tuple[str | None, dict[str, Any]]], wanted: Wanted) -> dict[str, Any]:
    """One document of all runs. Of all faults planted in turn, each must be named; the verdict is of the clean runs."""
    if wanted.plant != EVERY:
        return finished([one for _, one in found], wanted.batch_invariant)
    document = finished([one for kind, one in found if kind is None], wanted.batch_invariant)
    faults = {}
    for kind, planted in found:
        if kind is not None:
            one = finished([planted], wanted.batch_invariant)
            said = {name: one[name] for name in ("verdict", "suspect", "reason")}
            faults[kind] = said | {"named": one["suspect"] == kind}
    missed = [kind for kind, fault in faults.items() if not fault["named"]]
    if missed and document["verdict"] in verdict.PASSING:
        reason = f"planted on purpose and not named: {', '.join(missed)}"
        document |= {"verdict": verdict.NOT_SHOWN, "reason": reason}
    return document | {"faults": faults}


def finished(found: list[dict[str, Any]], batch_invariant: bool) -> dict[str, Any]:
    """The document of the worst of several runs, with all verdicts; differences may have been judged again since."""
    for document in found:
        for row in document["cases"]:
            kinds = [one.kind for one in row["differences"]]
            row["near_ties"] = kinds.count("near-tie")
            if row["verdict"] == FAULT and row["note"] is None and "fault" not in kinds and not batch_invariant:
                row["verdict"] = NEAR_TIES
            row["differences"] = [one.to_dict() for one in row["differences"][:8]]
        document["verdict"], document["reason"] = verdict.decide(document)
        document["suspect"] = verdict.suspect(document) if document["verdict"] == FAULT else None
    chosen = max(found, key=lambda one: verdict.BEST_FIRST.index(one["verdict"]))
    names = ("seed", "verdict", "drafted", "accepted", "plain_repeats", "own_drafts")
    each = [{name: one.get(name) for name in names} for one in found]
    return chosen | {"runs": len(found), "verdicts": Counter(one["verdict"] for one in found), "each": each}


def save(document: dict[str, Any], results: Path) -> dict[str, Any]:
    """Write a document to `results`/verify, where reports look for an arm's verdict; names of planted faults differ."""
    run_id = new_run_id()
    name = document["arm_key"] if document["planted"] in (None, EVERY) else f"planted-{document['planted']}"
    file = results / quality.VERDICTS / f"{name}-{run_id}.json"
    atomic_write(file, json.dumps(document, indent=1) + "\n")
    return document | {"file": str(file)}


@contextmanager
def _foreign_head(cfg: RunConfig) -> Iterator[RunConfig]:
    """`cfg` with a head that claims to agree with the model and does not; its file names no model to be refused by."""
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
