"""Download a model from the Hugging Face Hub: the files that vLLM reads, at one commit, into the Hub's own cache.

huggingface_hub does the transfer: it honours HF_ENDPOINT (a mirror), HF_HUB_OFFLINE, HF_HUB_CACHE and HF_TOKEN, and
resumes a file when the connection breaks. After a process was killed, files that were whole are kept and the one in
hand begins again (huggingface_hub 2 gives every process a file of its own). This module decides what is fetched, and
says beforehand whether the disk and the GPU have room.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec_cli.config import memory, paths
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.whole import atomic_write

INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin", ".pt")
"""Kinds of weight files in the order in which vLLM looks for them."""
BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Ends of the other files that vLLM and its tokenizers read."""
ROOM = 1.02  # of the download's size has to be free, because the cache's own files come on top


class PullError(RuntimeError):
    """The download failed for a reason that another try may cure. The command exits with 1."""


@dataclass(frozen=True)
class Pull:
    """What one command fetches.

    commit: of the repository, 40 hex digits. files: (name, bytes) to have. missing: those that are not in the cache.
    fits: whether a GPU of this machine has room, None where that cannot be said. needs: the sum, in words.
    """

    model: str
    commit: str
    files: tuple[tuple[str, int], ...]
    missing: tuple[tuple[str, int], ...]
    fits: bool | None
    needs: str

    @property
    def to_fetch(self) -> int:
        """Bytes that are not in the cache."""
        return sum(size for _, size in self.missing)


def wanted(names: Sequence[str], shards: Sequence[str] | None, remote_code: bool) -> list[str]:
    """Of a repository's files those that vLLM reads, all of them at its top.

    Args:
        shards: the files that the index of the weights names; None without an index.
        remote_code: whether the model's own Python code is run.

    Raises:
        ConfigError: there are no weights that vLLM reads.
    """
    top = [name for name in names if "/" not in name]
    if shards:
        weights = [name for name in top if name in set(shards)]
    else:
        kinds = ([name for name in top if name.endswith(kind)] for kind in WEIGHTS)
        weights = next((found for found in kinds if found), [])
        weights = [name for name in weights if not name.startswith("consolidated")] or weights
    if not weights:
        raise ConfigError(
            f"the repository holds no weights that vLLM reads ({', '.join(WEIGHTS)} at its top); "
            f"its files: {', '.join(sorted(top)[:12]) or 'none'}"
        )
    ends = (*BESIDE, ".py") if remote_code else BESIDE
    beside = [name for name in top if name.endswith(ends) and not name.endswith(".bin.index.json")]
    templates = [name for name in names if name.startswith("additional_chat_templates/") and name.endswith(".jinja")]
    return sorted({*weights, *beside, *templates})


def plan(cfg: RunConfig) -> Pull:
    """Ask the Hub what there is, and decide. Fetches config.json and the index of the weights, which are small.

    Raises:
        ConfigError: the model, its revision or the access to it is wrong, or there is no network and no complete copy.
        PullError: the Hub cannot be reached.
    """
    name = cfg.model.path
    if paths.model_path(cfg.model) != name or "/" not in name:
        raise ConfigError(
            f"model={name}: only a model on the Hugging Face Hub can be pulled, such as "
            "model=HuggingFaceTB/SmolLM2-135M-Instruct; this one is a folder"
        )
    from huggingface_hub import HfApi

    with _explained(cfg):
        info = HfApi().model_info(name, revision=cfg.model.revision, files_metadata=True)
    sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    commit = str(info.sha)
    shards = None
    if INDEX in sizes:
        shards = sorted(set(_json(_fetch(cfg, INDEX, commit))["weight_map"].values()))
    files = tuple((file, sizes[file]) for file in wanted(list(sizes), shards, cfg.model.trust_remote_code))
    document = _json(_fetch(cfg, "config.json", commit)) if "config.json" in sizes else {}
    weights = sum(size for file, size in files if file.endswith(WEIGHTS))
    fits, needs = _fits(cfg, document, weights)
    missing = tuple((file, size) for file, size in files if paths.in_hub_cache(cfg.model, file, commit) is None)
    return Pull(name, commit, files, missing, fits, needs)


def run(cfg: RunConfig, chosen: Pull) -> Path:
    """Fetch what is missing, with huggingface_hub's own bars on stderr -> the folder of the snapshot in the cache.

    A file is whole before it gets its name, so the same command goes on after an interrupt with what is missing.

    Raises:
        ConfigError: the disk has no room. PullError: the transfer broke off.
    """
    check_room(chosen.to_fetch, cache_folder())
    for file, _ in chosen.missing:
        _fetch(cfg, file, chosen.commit)
    place = _fetch(cfg, next(file for file, _ in chosen.files if "/" not in file), chosen.commit).parent
    revision = cfg.model.revision or "main"
    if revision != chosen.commit:  # huggingface_hub, asked for a commit, leaves no note of what it is called
        atomic_write(place.parents[1] / "refs" / revision, chosen.commit)
    return place


def is_whole(cfg: RunConfig, commit: str) -> bool:
    """Whether the cache holds a model's weights, all that their index names: others fetch its config.json alone."""
    config = paths.in_hub_cache(cfg.model, "config.json", commit)
    if config is None:
        return False
    snapshot = config.parent
    if (snapshot / INDEX).is_file():
        return all((snapshot / file).is_file() for file in _json(snapshot / INDEX)["weight_map"].values())
    return any(file.name.endswith(WEIGHTS) for file in snapshot.glob("*"))


def check_room(size: int, folder: Path) -> None:
    """Raises ConfigError where the disk of `folder` has too little room for `size` bytes."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if free < size * ROOM:
        raise ConfigError(
            f"{folder} has {free / memory.GIB:.1f} GiB free, and {size / memory.GIB:.1f} GiB are to be fetched: free "
            "some, or set HF_HUB_CACHE to a folder on another disk"
        )


def cache_folder() -> Path:
    """Where huggingface_hub keeps what it fetches."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _fits(cfg: RunConfig, document: dict[str, Any], weights: int) -> tuple[bool | None, str]:
    text = document.get("text_config", document)
    layers = text.get("num_hidden_layers") or text.get("n_layer")
    drafting = min(cfg.layer / layers, 1.0) if cfg.layer and layers else 1.0
    tokens = cfg.model.max_model_len or text.get("max_position_embeddings")
    found = memory.needed(document, weights, cfg.draft_weights, drafting, tokens, cfg.model.tensor_parallel_size)
    cards = memory.gpu_memory(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return memory.verdict(found, cards, cfg.engine.gpu_memory_utilization)


def _fetch(cfg: RunConfig, file: str, commit: str) -> Path:
    from huggingface_hub import hf_hub_download

    with _explained(cfg):
        return Path(hf_hub_download(cfg.model.path, file, revision=commit))


def _json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8")))


@contextmanager
def _explained(cfg: RunConfig) -> Iterator[None]:
    """Errors of huggingface_hub as ours, in words that say what to do."""
    from huggingface_hub import constants, errors

    name = f"model={cfg.model.path}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{name} is gated: ask for access on the model's page on the Hub, make a token that may read it, and set "
            "HF_TOKEN (or run hf auth login)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"model.revision={cfg.model.revision}: {cfg.model.path} has no such branch, tag or commit"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{name}: the Hub knows no such model, or it is private and HF_TOKEN is no token that may read it"
        ) from error
    except Exception as error:  # the transport's own errors have no common class
        if constants.HF_HUB_OFFLINE:
            raise ConfigError(f"{name}: HF_HUB_OFFLINE is set, so the Hub is not asked; unset it to pull") from error
        reason = " ".join(str(error).split())[:200]
        raise PullError(
            f"{name}: {constants.ENDPOINT} could not deliver it ({type(error).__name__}: {reason}); the same command "
            "fetches what is missing"
        ) from error
