"""Method `vllm`: an arm that drafts by any `speculative_config` of vLLM's own, for comparison with early exit.

`RunConfig.speculative` holds that mapping without the draft length, which is `k` for every method. What it may hold is
read from the installed vLLM's source, because importing vLLM takes seconds and a plan should not.
"""

import ast
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from selfspec_cli.config.choices import file_choices
from selfspec_cli.config.facts import device_of
from selfspec_cli.config.paths import model_path
from selfspec_cli.config.schema import ConfigError, Method, ModelConfig, RunConfig
from selfspec_cli.early_exit.errors import closest
from selfspec_cli.early_exit.settings import METHODS, SPECULATIVE_LENGTH

KEY = "speculative"
SUFFIX_PACKAGE = "arctic_inference"

DRAFTERS = ("draft_model", "eagle", "eagle3", "dflash", "dspark", "medusa", "mlp_speculator")
"""The methods of vLLM that draft with weights of their own, which `model` must name."""

# By the source of vLLM's CPU build (v1/spec_decode/ngram_proposer_gpu.py).
NOT_ON_CPU = {"ngram_gpu": "it copies drafts on streams of torch.cuda; speculative=ngram does the same on a CPU"}

_SET_BY_VLLM = ("target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config")


def spec_of(cfg: RunConfig) -> dict[str, Any]:
    """The `speculative_config` of method `vllm` as vLLM gets it."""
    spec = dict(cfg.speculative) | {SPECULATIVE_LENGTH: cfg.k}
    draft = draft_of(cfg)
    return spec if draft is None else spec | {"model": model_path(draft)}


def draft_of(cfg: RunConfig) -> ModelConfig | None:
    """The model, head or other weights that draft, None where there are none. Its path may be `reference` too."""
    spec = cfg.speculative
    if cfg.method is not Method.vllm or not spec.get("model"):
        return None
    return ModelConfig(path=str(spec["model"]), revision=spec.get("revision"))


def in_words(spec: Mapping[str, Any]) -> str:
    """A mapping on one line: the method, the last part of the draft's path, and every other setting but the length."""
    draft = Path(str(spec["model"])).name if spec.get("model") else None
    others = sorted(spec.keys() - {"method", "model", SPECULATIVE_LENGTH})
    return " ".join(filter(None, [spec.get("method"), draft, *(f"{name}={spec[name]}" for name in others)]))


@cache
def known_to_vllm() -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """(the methods, the keys) of a speculative_config by the installed vLLM's source; None where none is installed."""
    package = importlib.util.find_spec("vllm")
    file = Path(str(package.origin)).parent / "config" / "speculative.py" if package and package.origin else None
    if file is None or not file.is_file():
        return None
    literals: dict[str, ast.expr] = {}
    keys: list[str] = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Subscript(ast.Name("Literal"), words)):
                literals[name] = words
            case ast.ClassDef("SpeculativeConfig", body=columns):
                names = [column.target for column in columns if isinstance(column, ast.AnnAssign)]
                keys = [name.id for name in names if isinstance(name, ast.Name) and name.id not in _SET_BY_VLLM]
    return tuple(dict.fromkeys(_words(literals.get("SpeculativeMethod"), literals))), tuple(keys)


def _words(node: ast.expr | None, literals: Mapping[str, ast.expr]) -> list[str]:
    """The strings of a Literal, with those of the Literals that it names."""
    match node:
        case ast.Tuple(inner):
            return [word for one in inner for word in _words(one, literals)]
        case ast.Name(name):
            return _words(literals.get(name), literals)
        case ast.Constant(str(word)):
            return [word]
    return []


def check_words(cfg: RunConfig) -> None:
    """Refuse (ConfigError) a mapping that vLLM would not understand, by its words alone."""
    if cfg.method is not Method.vllm:
        return
    spec = cfg.speculative
    method = spec.get("method")
    if not method and not spec.get("model"):
        named = ", ".join(name for name in file_choices(KEY) if name != "none")
        raise ConfigError(
            f"method=vllm: speculative must say how vLLM is to draft; allowed: {named}, or a "
            """speculative_config such as speculative='{"method": "ngram"}'"""
        )
    if method in METHODS:
        raise ConfigError(
            f"speculative.method={method}: that is selfspec's own; use method={method}, and its settings "
            "by their own keys"
        )
    methods, keys = known_to_vllm() or ((), ())
    if methods and method is not None and method not in methods:
        raise ConfigError(closest(str(method), methods, f"{KEY}.method"))
    for key in spec:
        if keys and key not in keys:
            raise ConfigError(f"{KEY}: {closest(key, keys, 'key')}")
    length = spec.get(SPECULATIVE_LENGTH)
    if length is not None and (not isinstance(length, int) or length < 1):
        raise ConfigError(f"{KEY}.{SPECULATIVE_LENGTH}={length}: out of range; allowed: a whole number, 1 or more")


def check(cfg: RunConfig) -> None:
    """Refuse (ConfigError) a package, head or device that is not here; the engine looks at drafts on the Hub."""
    if cfg.method is not Method.vllm:
        return
    method = cfg.speculative.get("method")
    if method == "suffix" and importlib.util.find_spec(SUFFIX_PACKAGE) is None:
        raise ConfigError(
            f"speculative=suffix: vLLM takes it from a package that is not installed here; pip install "
            f"{SUFFIX_PACKAGE.replace('_', '-')}"
        )
    if device_of(cfg) == "cpu" and method in NOT_ON_CPU:
        raise ConfigError(f"speculative.method={method}: vLLM's CPU build cannot do it: {NOT_ON_CPU[method]}")
    draft = draft_of(cfg)
    if draft is None and method in DRAFTERS:
        raise ConfigError(
            f"speculative={method}: it drafts with weights of its own; name them: "
            "speculative.model=./FOLDER, or an id of the Hub"
        )
    try:
        if draft is not None:
            model_path(draft)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path=", f"{KEY}.model=")) from error


def warning(cfg: RunConfig) -> str | None:
    """Why a measurement of this arm would not say what it seems to; None where nothing speaks against it."""
    remembers = cfg.speculative.get("suffix_decoding_max_cached_requests") != 0
    if cfg.method is Method.vllm and cfg.speculative.get("method") == "suffix" and remembers:
        return (
            "suffix decoding remembers the answers to earlier requests, and a benchmark repeats its prompts: its "
            "drafts are the answers of the warm-up; speculative.suffix_decoding_max_cached_requests=0 forgets them"
        )
    return None
