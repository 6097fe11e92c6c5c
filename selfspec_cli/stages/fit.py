"""Fit exit heads, and copies of the weights, for one model.

Heads: text is streamed through the model, and one pass serves all layers and heads, which are solved in closed form.
The ridge is chosen on other windows of the text that is fitted, and the agreement reported is measured on text held out
from it. Copies: one eager engine generates answers to prompts of the workload's kind, other ones than those that are
measured; what each linear layer sees meanwhile decides how its weight is rounded (GPTQ's method).
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec_cli.config import machine
from selfspec_cli.config.facts import model_facts, needed
from selfspec_cli.config.model_files import draft_vocabulary, head_folder
from selfspec_cli.config.schema import ConfigError, Method, RunConfig
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.equations import FitError
from selfspec_cli.early_exit.heads import HeadSpec
from selfspec_cli.engine.live import Engine, OpenEngine, open_engine
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.texts import corpora
from selfspec_cli.texts.corpora import Corpus
from selfspec_cli.texts.prompts import workload_prompts

WINDOW = 512  # tokens a prompt
CHUNK = 16  # prompts handed over at once; the progress bar's step
HELD_OUT_PAIRS = 4096  # for validation, and again for the test
GPU_CACHE = 2**31  # bytes of KV cache on a GPU: what fitting needs beside it grows with the vocabulary


@dataclass(frozen=True)
class Request:
    """What to fit. heads: short names (`HeadSpec`), the lens among them only to be compared. pairs: (hidden state,
    target). ridge: relative; None is chosen. vocabularies: as `RunConfig.vocab`, besides the full one."""

    layers: Sequence[int]
    heads: Sequence[str] = ("lens", "lsq")
    pairs: int = 50_000
    ridge: float | None = None
    vocabularies: Sequence[str] = ()
    corpus: str = "stdlib"


@dataclass
class FitResult:
    """What was fitted. reports: one a head and vocabulary, layer by layer. seconds: from the engine's start on."""

    reports: list[dict[str, Any]]
    seconds: float
    warnings: list[str] = field(default_factory=list)


def run(
    cfg: RunConfig, request: Request, *, open_engine: OpenEngine = open_engine, progress: Progress = ignore
) -> FitResult:
    """Fit heads on an engine of its own. Raises ConfigError, SettingsError, FitError: what is asked for is not there,
    or no fit can use the data."""
    check(cfg, request)
    corpus = corpora.load(request.corpus)
    start = time.perf_counter()
    plain = replace(cfg, method=Method.baseline)
    with open_engine(plain, **_engine_arguments(cfg, request)) as engine:
        warnings = _warnings(engine, request)
        _collect(cfg, engine, request, corpus, progress)
        reports = _solve(cfg, engine, request, corpus)
        seconds = time.perf_counter() - start
    return FitResult(reports, seconds, warnings)


def save_as_pt(cfg: RunConfig, fitted: FitResult) -> list[Path]:
    """Write the least-squares heads of a fit into head_dir as ee_layer{E}_lsq.pt too; the files."""
    from selfspec_cli.early_exit.artifact import load_head, save_pt

    made = []
    for report in fitted.reports:
        if report.get("head") == "lsq" and report.get("vocab", "full") == "full":
            made.append(save_pt(Path(cfg.head_dir).expanduser(), *load_head(report["path"])))
            report["pt"] = str(made[-1])
    return made


def _warnings(engine: Engine, request: Request) -> list[str]:
    fits = any(HeadSpec.from_name(name).target is not None for name in request.heads)
    if request.corpus != "stdlib" or not fits or not engine.has_template:
        return []
    return [
        "this is a chat model (its tokenizer has a chat template), and its heads are fitted on Python's standard "
        "library, which is not what it writes; --corpus takes chats: a .json or .jsonl as ShareGPT has them"
    ]


def check(cfg: RunConfig, request: Request) -> None:
    """Refuse what cannot be fitted, before an engine starts; raises as `run`."""
    total = needed(cfg, "layers")
    for layer in request.layers:
        if not 1 <= layer < total:
            raise ConfigError(f"layer={layer}: must be 1 to {total - 1} (the model has {total} layers)")
    if request.pairs < 1:
        raise ConfigError(f"pairs={request.pairs}: must be at least 1")
    if request.ridge is not None and not 0 <= request.ridge < float("inf"):
        raise ConfigError(f"ridge={request.ridge}: must be at least 0, and finite")
    if cfg.model.load_format == "dummy" and cfg.model.tokenizer is None and request.corpus != "random":
        raise ConfigError(
            f"corpus={request.corpus}: dummy weights come without a tokenizer; use --corpus random "
            "(it times a fit and says nothing about its head)"
        )
    for name in request.heads:
        HeadSpec.from_name(name)


def _engine_arguments(cfg: RunConfig, request: Request) -> dict[str, Any]:
    """Prompts are short and nothing is decoded for long, so the engine is small: the memory is for the sums."""
    limits = [WINDOW + 1, cfg.model.max_model_len, model_facts(cfg).max_position]
    arguments: dict[str, Any] = {
        "additional_config": {"selfspec_collect": sorted(request.layers)},
        "enforce_eager": True,
        "max_model_len": min(limit for limit in limits if limit),
    }
    if cfg.engine.kv_cache_gib is None:
        arguments["kv_cache_memory_bytes"] = GPU_CACHE
    if request.corpus == "random":
        arguments["skip_tokenizer_init"] = True
    return arguments


def _collect(cfg: RunConfig, engine: Engine, request: Request, corpus: Corpus, progress: Progress) -> None:
    # Windows may overlap; another seed begins them elsewhere. The ridge of a fit, and the scale of a head whose outputs
    # are no distribution, are chosen on the windows of "validate".
    parts = (
        ("fit", "fitting", request.pairs, cfg.seed),
        ("validate", "fitting", HELD_OUT_PAIRS, cfg.seed + 1),
        ("test", "held_out", HELD_OUT_PAIRS, cfg.seed),
    )
    wanted = {mode: pairs for mode, _, pairs, _ in parts}
    engine.call("early_exit_collect", list(request.heads), {"wanted": wanted, "ridge": request.ridge})
    for mode, part, pairs, seed in parts:
        _stream(engine, mode, corpus, part, pairs, seed, progress)


def _solve(cfg: RunConfig, engine: Engine, request: Request, corpus: Corpus) -> list[dict[str, Any]]:
    from selfspec_cli.early_exit import draft_vocab

    folder = head_folder(cfg).absolute()
    wanted = [vocab for vocab in request.vocabularies if vocab != "full"]
    if any(vocab.isdigit() for vocab in wanted) and not corpus.is_random:
        _count(engine, corpus, folder)
    vocabularies, words = {}, {"full": "full"}
    for vocab in wanted:
        ids = draft_vocabulary(replace(cfg, vocab=vocab), engine.vocab_size, lambda: _count(engine, corpus, folder))
        assert ids is not None
        tag = str(draft_vocab.tag_of(vocab, ids))
        vocabularies[tag], words[tag] = ids.tolist(), vocab
    about = {"corpus": corpus.name, "versions": machine.versions()}
    reports = engine.call("early_exit_fit", str(folder), about, vocabularies)
    return [found | {"vocab": words[found["vocab"]]} for found in reports]


def _count(engine: Engine, corpus: Corpus, folder: Path) -> Any:
    """Token counts of the corpus, left in the folder of heads for whatever asks for a draft vocabulary later."""
    from selfspec_cli.early_exit import draft_vocab

    counts = draft_vocab.load_counts(folder, engine.vocab_size, corpus.name)
    if counts is None:
        counts = corpus.counts(engine.encode, engine.vocab_size)
        draft_vocab.save_counts(folder, counts, corpus.name)
    return counts


def _stream(engine: Engine, mode: str, corpus: Corpus, part: str, pairs: int, seed: int, progress: Progress) -> None:
    """Run prompts through the model until the worker has `pairs` pairs for `mode`."""
    engine.call("early_exit_collect_mode", mode)
    length = min(WINDOW, engine.max_model_len - 1)
    # Chunked prefill may split a prompt and lose the pair at the seam; a few windows more make up for it.
    count = -(-pairs // (length - 1)) + 2
    windows = corpus.windows(part, engine.encode, engine.vocab_size, length, count, seed)
    done = 0
    for start in range(0, len(windows), CHUNK):
        engine.generate(windows[start : start + CHUNK], 1, batch=CHUNK)
        state = engine.call("early_exit_collected")
        if state["error"] is not None:
            raise FitError(state["error"])  # in the worker's words
        done = int(state[mode])
        progress(mode, done, pairs)
        if done >= pairs:
            return
    raise ConfigError(f"corpus={corpus.name}: the text gave only {done} of {pairs} pairs")


@dataclass
class Fitted:
    """path: of the file. tokens: looked at. errors: by layer, the share of the product's mean square that is lost by
    rounding to nearest and by rounding with the data. seconds: until it was written."""

    path: str
    kind: str
    tokens: int
    errors: dict[str, dict[str, float]]
    seconds: float

    @property
    def medians(self) -> dict[str, float]:
        """The median over the layers of each error."""
        names = ("nearest", "fitted")
        found = {name: [error[name] for error in self.errors.values() if name in error] for name in names}
        return {name: statistics.median(values) for name, values in found.items() if values}


def check_weights(cfgs: Sequence[RunConfig], out: Path | None = None) -> None:
    """Refuse what cannot be fitted, before an engine starts; raises ConfigError."""
    for cfg in cfgs:
        if not DRAFT_WEIGHTS[cfg.draft_weights].copies:
            kinds = ", ".join(name for name, kind in DRAFT_WEIGHTS.items() if kind.copies)
            raise ConfigError(f"draft_weights={cfg.draft_weights}: name the kind of copies to make; allowed: {kinds}")
        if cfg.draft_weights_path is not None:
            raise ConfigError("draft_weights_path names a file to draft with; name the one to write by --out")
        if (cfg.model, cfg.engine, cfg.workload) != (cfgs[0].model, cfgs[0].engine, cfgs[0].workload):
            raise ConfigError("copies are fitted on one engine: name one model, one engine and one workload")
    if out is not None and len(cfgs) > 1:
        raise ConfigError(f"--out {out}: it names one file, and {len(cfgs)} are made; leave it out, or name one kind")


def path_for(cfg: RunConfig) -> Path:
    """Where the file goes that nobody named: beside the model's heads."""
    return head_folder(cfg) / f"weights-{cfg.draft_weights}.safetensors"


def run_weights(
    cfgs: Sequence[RunConfig],
    *,
    open_engine: OpenEngine,
    prompts: int,
    out: Path | None = None,
    progress: Progress = ignore,
) -> list[Fitted]:
    """Fit copies of the kind of each of `cfgs` on `prompts` answers of the model, which are looked at once. out: the
    file, where one is made. Raises ConfigError, SettingsError: there can be no such copies, or no prompts."""
    check_weights(cfgs, out)
    cfg, start = cfgs[0], time.perf_counter()
    work = cfg.workload
    plain = replace(
        cfg,
        method=Method.baseline,
        draft_weights="shared",
        seed=cfg.seed + 1,
        engine=replace(cfg.engine, enforce_eager=True),
        workload=replace(work, num_prompts=prompts),
    )
    about = {"prompts": work.prompts, "temperature": work.temperature, "versions": machine.versions()}
    made: list[Fitted] = []
    with open_engine(plain) as engine:
        engine.call("early_exit_observe")
        asked = workload_prompts(plain, engine)
        batch = min(prompts, cfg.engine.max_num_seqs)
        progress("answers, then files", 0, 1 + len(cfgs))
        engine.generate(asked, work.output_len, batch=batch, temperature=work.temperature, seed=plain.seed)
        progress("answers, then files", 1, 1 + len(cfgs))
        for number, one in enumerate(cfgs, start=2):
            kind, path = one.draft_weights, path_for(one) if out is None else out
            report = engine.call("early_exit_fit_weights", str(path), kind, about)
            seconds = time.perf_counter() - start
            made.append(Fitted(str(path), kind, report["tokens"], report["layers"], seconds))
            progress("answers, then files", number, 1 + len(cfgs))
    return made
