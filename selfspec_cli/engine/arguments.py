"""A config as the arguments of `vllm.LLM`, and what a model's tokenizer says without an engine."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from selfspec_cli.config.facts import config_document, config_file, longest_request, needed
from selfspec_cli.config.model_files import head_file
from selfspec_cli.config.paths import model_path
from selfspec_cli.config.schema import EARLY_EXIT, ConfigError, Method, RunConfig, Runner
from selfspec_cli.config.speculative import spec_of
from selfspec_cli.early_exit.settings import SPECULATIVE_LENGTH, to_spec, vllm_keys
from selfspec_cli.early_exit.view import DraftView
from selfspec_cli.texts import corpora
from selfspec_cli.texts.prompts import Tokens
from selfspec_cli.vllm_plugin.spec_config import WORKER_EXTENSION

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def llm_arguments(cfg: RunConfig, scratch: Path) -> dict[str, Any]:
    """`cfg` as keyword arguments of `vllm.LLM`. scratch: a folder that lasts until the engine has started."""
    engine, model = cfg.engine, cfg.model
    arguments: dict[str, Any] = {
        "model": model_path(model),
        "tokenizer": model.tokenizer,
        "revision": model.revision,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "load_format": model.load_format,
        "trust_remote_code": model.trust_remote_code,
        "tensor_parallel_size": model.tensor_parallel_size,
        "enforce_eager": engine.enforce_eager,
        "max_num_seqs": engine.max_num_seqs,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "seed": cfg.seed,
        "disable_log_stats": False,  # the counters of accepted drafts are log statistics
        "worker_extension_cls": WORKER_EXTENSION,
        "speculative_config": speculative_config(cfg, scratch),
        "skip_tokenizer_init": model.load_format == "dummy" and model.tokenizer is None,
    }
    optional = {
        "max_model_len": model.max_model_len,
        "hf_overrides": model.hf_overrides or None,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "kv_cache_memory_bytes": engine.kv_cache_gib and int(engine.kv_cache_gib * 2**30),
    }
    arguments |= {name: value for name, value in optional.items() if value is not None}
    return arguments | engine.extra


def runner_variables(cfg: RunConfig) -> dict[str, str]:
    """The variable by which vLLM learns which model runner to use; none where it chooses."""
    return {} if cfg.runner is Runner.auto else {RUNNER: "1" if cfg.runner is Runner.v2 else "0"}


def speculative_config(cfg: RunConfig, scratch: Path) -> dict[str, Any] | None:
    """What `cfg` asks of vLLM's speculative decoding, as a user would write it; None for a baseline."""
    if cfg.method is Method.baseline:
        return None
    if cfg.method in EARLY_EXIT:
        head = replace(cfg.head, path=head_path(cfg))
        # The file that was found, or made, has the draft vocabulary.
        return to_spec(replace(cfg, head=head, vocab=RunConfig.vocab))
    if cfg.method is Method.vllm:
        return spec_of(cfg) | vllm_keys(cfg)
    spec = {"method": cfg.method.value, SPECULATIVE_LENGTH: cfg.k, "model": str(shallow_model(cfg, scratch))}
    return spec | vllm_keys(cfg)


def shallow_model(cfg: RunConfig, folder: Path) -> Path:
    """The config of `cfg`'s model with E layers, written to `folder`: a separate draft of the depth of early exit.
    Raises ConfigError if the model's config cannot be had."""
    layer = cfg.layer or DraftView().default_layer(needed(cfg, "layers"))
    file = config_file(cfg.model, fetch=True)
    assert file is not None  # fetched, or refused
    config = config_document(file)
    text = config.get("text_config") or config  # a model of more than text counts its layers there
    text["num_hidden_layers"] = layer
    if text.get("layer_types"):  # the kind of each layer; transformers refuses a list of another length
        text["layer_types"] = text["layer_types"][:layer]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def head_path(cfg: RunConfig) -> str | None:
    """The file of the exit head that `cfg` asks for; None for the lens over the full vocabulary. Raises ConfigError: it
    has not been fitted yet; HeadError: the draft vocabulary is not one of this model's."""
    if cfg.head.kind == "lens" and cfg.head.path is None and cfg.vocab == "full":
        return None
    layer = cfg.layer or DraftView.of(cfg).default_layer(needed(cfg, "layers"))
    size = needed(cfg, "vocab_size")
    path = head_file(
        cfg, layer, needed(cfg, "hidden"), size, lambda: corpora.load("stdlib").counts(ModelTokens(cfg).encode, size)
    )
    return None if path is None else str(path)


@dataclass
class ModelTokens(Tokens):
    """What prompts need to know of a model, from its files; starts no engine."""

    cfg: RunConfig

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have together; without a limit where the files name none."""
        return longest_request(self.cfg) or sys.maxsize

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to this, exclusive; raises ConfigError."""
        return needed(self.cfg, "vocab_size")

    @cached_property
    def tokenizer(self) -> Any:
        """As transformers has it; raises ConfigError where the model has none."""
        from transformers import AutoTokenizer

        model = self.cfg.model
        try:
            return AutoTokenizer.from_pretrained(
                model.tokenizer or model_path(model), revision=model.revision, trust_remote_code=model.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model={model.name}: it has no tokenizer; name one (model.tokenizer=NAME), or use "
                "workload.prompts=random and for vocab a file of token ids"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Text -> token ids, without special tokens; a text longer than the model takes is no reason for a warning."""
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))
