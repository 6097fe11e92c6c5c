"""Files that `selfspec tune` wrote, found by the name of a model and told apart by the content of its weights.

conf/tuned/NAME-FINGERPRINT.yaml: two models may share a name (orgA/M and orgB/M), and one name may come to mean other
weights. A file is used for the model that it was made for and for no other.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from selfspec_cli.config.choices import file_choices
from selfspec_cli.config.model_digest import SHORT, model_fingerprint, safe_name
from selfspec_cli.config.paths import read_yaml
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.early_exit.errors import closest, nearest

FOLDER = "tuned"
_KEYS = ("title", "model", "overrides")


@dataclass(frozen=True)
class TunedFile:
    """What a file holds. model: how its user named the model. overrides: as typed on the command line."""

    path: Path
    name: str
    model: str
    fingerprint: str
    overrides: list[str]

    @property
    def owner(self) -> str:
        """The model that it was made for, for people."""
        return f"{self.model} (weights {self.fingerprint[:SHORT]})"


def find(name: str, folders: Iterable[Path]) -> list[TunedFile]:
    """Every file for models called `name`; of two folders that hold one model's file, the first is taken.

    Raises:
        ConfigError: no model of that name was tuned (names the nearest), or a file of another shape.
    """
    names = _files(folders)
    wanted = [file for file, model in names.items() if model == safe_name(name)]
    if not wanted:
        known, models = sorted(set(names.values())), file_choices("model")
        model = name if name in models else nearest(name, models) or name
        meant = "" if model == name else f"; did you mean {model!r}?"
        which = closest(name, known, FOLDER) if known else f"tuned={name}: no model was tuned yet{meant}"
        raise ConfigError(f"{which}; make it with: selfspec tune model={model}")
    return [_read(file, name) for file in wanted]


def models(folders: Iterable[Path]) -> list[str]:
    """The names of the models that were tuned."""
    return sorted(set(_files(folders).values()))


def _files(folders: Iterable[Path]) -> dict[Path, str]:
    """Every file, with its model's name; the first folder that has a file of a name wins."""
    found: dict[str, Path] = {}
    for folder in folders:
        for file in sorted((folder / FOLDER).glob("*.yaml")):
            found.setdefault(file.name, file)
    pattern = re.compile(rf"(.+)-[0-9a-f]{{{SHORT}}}\.yaml")
    return {found[name]: match[1] for name in found if (match := pattern.fullmatch(name))}


def choose(name: str, matches: Sequence[tuple[TunedFile, Sequence[RunConfig]]]) -> TunedFile:
    """The file that belongs to the model of the command.

    matches: every file of `find`, with the configs that name the model once the file's overrides are applied.

    Raises:
        ConfigError: no file is of that model's weights, or several are, each of the model that it names itself.
    """
    right = [file for file, cfgs in matches if all(model_fingerprint(cfg) == file.fingerprint for cfg in cfgs)]
    if len(right) == 1:
        return right[0]
    if right:
        owners = " and ".join(file.owner for file in right)
        raise ConfigError(
            f"tuned={name}: several models of that name were tuned, {owners}; name one: "
            f"model={right[0].model} tuned={name}"
        )
    file, cfgs = matches[0]
    cfg = next(cfg for cfg in cfgs if model_fingerprint(cfg) != file.fingerprint)
    raise ConfigError(
        f"tuned={name}: {file.path} was made for {file.owner}, and this is {cfg.model.path} (weights "
        f"{model_fingerprint(cfg)[:SHORT]}); tune this one: selfspec tune model={cfg.model.path}"
    )


def _read(path: Path, name: str) -> TunedFile:
    content = read_yaml(path, _KEYS)
    model, overrides = content.get("model"), content.get("overrides")
    if not isinstance(overrides, list) or not isinstance(model, dict) or not {"path", "fingerprint"} <= model.keys():
        raise ConfigError(f"{path}: it is no file that selfspec tune wrote; make it again with: selfspec tune")
    return TunedFile(path, name, str(model["path"]), str(model["fingerprint"]), [str(word) for word in overrides])
