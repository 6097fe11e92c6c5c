"""Fit exit heads for one model: stream text through it, solve in closed form, test, save.

The ridge is chosen on other windows of the text that is fitted, and the agreement reported is measured on text held
out from it. One pass serves all layers and heads.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfspec_cli.config import machine
from selfspec_cli.config.facts import model_facts, needed
from selfspec_cli.config.head_files import draft_vocabulary
from selfspec_cli.config.model_digest import head_folder
from selfspec_cli.config.schema import ConfigError, Method, RunConfig
from selfspec_cli.early_exit.fitting import FitError
from selfspec_cli.early_exit.heads import HeadSpec
from selfspec_cli.engine.live import Engine, OpenEngine, open_engine
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.texts import corpora
from selfspec_cli.texts.corpora import Corpus

WINDOW = 512  # tokens a prompt
CHUNK = 16  # prompts handed over at once; the progress bar's step
HELD_OUT_PAIRS = 4096  # for validation, and again for the test
GPU_CACHE = 2**31  # bytes of KV cache on a GPU: what fitting needs beside it grows with the vocabulary


@dataclass(frozen=True)
class Request:
    """What to fit. heads: short names (`HeadSpec`), the lens among them only to be compared. pairs: (hidden state,
    target). ridge: relative; None is chosen. vocabularies: as `RunConfig.vocab`, besides the full one. corpus: see
    corpora.py.
    """

    layers: tuple[int, ...]
    heads: tuple[str, ...] = ("lens", "lsq")
    pairs: int = 50_000
    ridge: float | None = None
    vocabularies: tuple[str, ...] = ()
    corpus: str = "stdlib"


@dataclass
class FitResult:
    """What was fitted. reports: one a head and vocabulary, layer by layer. seconds: from the engine's start on."""

    reports: list[dict[str, Any]]
    seconds: float
    warnings: list[str] = field(default_factory=list)


def run(
    cfg: RunConfig,
    *,
    layers: Sequence[int],
    pairs: int = 50_000,
    heads: Sequence[str] = ("lens", "lsq"),
    open_engine: OpenEngine = open_engine,
    progress: Progress = ignore,
    **more: Any,
) -> FitResult:
    """Fit `heads` at `layers` on `pairs` pairs, on an engine of its own. more: further fields of `Request`. Raises
    ConfigError: a layer outside 1..L-1, fewer than one pair, a corpus that cannot be had; SettingsError, FitError: a
    head that there is not, or data that no fit can use."""
    request = Request(tuple(dict.fromkeys(layers)), tuple(dict.fromkeys(heads)), pairs, **more)
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
    """Why heads of this fit may draft worse than they could."""
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
