"""What the plugin relies on in the vLLM that is installed; test_vllm_sources.py reads the source of each release."""

import ast
import pkgutil
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config
from vllm.config import CompilationConfig
from vllm.model_executor.layers import linear
from vllm.model_executor.layers import utils as layers
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm_source import V1_PROPOSER, V2_SPECULATOR

import selfspec_cli
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.stages.verify import run as verifying
from selfspec_cli.vllm_plugin import compat, patches, trunk
from selfspec_cli.vllm_plugin.target_facts import facts_of
from selfspec_cli.vllm_plugin.weights.shared import SharedLinear, multiplies_with_pytorch, on_own_weight


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: patch.target)
def test_patch_target_and_replacement_exist(patch):
    found = {target: there for target, there, _ in compat.check()}
    assert found[patch.target], f"vLLM moved {patch.target}"
    assert callable(pkgutil.resolve_name(patch.replacement))


def test_inductor_has_the_setting_of_batch_invariant_engines():
    (compiled,) = verifying.deterministic(None).values()
    assert all(type(getattr(config, name)) is type(value) for name, value in compiled.items())


def test_graphs_go_through_our_pass_unless_the_user_has_given_one():
    pytest.importorskip("triton")
    from selfspec_cli.vllm_plugin.weights import lowbit

    ours, theirs = lowbit.graph_pass(), object()
    config = CompilationConfig()
    before = config.compute_hash()
    trunk._add_pass(config, None)
    assert config.compute_hash() == before
    options = config.inductor_compile_config
    trunk._add_pass(config, ours)
    assert config.inductor_compile_config[current_platform.pass_key] is ours
    assert current_platform.pass_key not in options  # the target's own options are left alone
    assert config.compute_hash() != before  # so artifacts with and without it are told apart
    config.inductor_compile_config = {current_platform.pass_key: theirs}
    trunk._add_pass(config, ours)
    assert config.inductor_compile_config[current_platform.pass_key] is theirs


@pytest.mark.parametrize(("capability", "known"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_without_8_bit_kernels_gets_no_copies(monkeypatch, capability, known):
    config = types.SimpleNamespace(intermediate_size=512)
    target = types.SimpleNamespace(
        quantization=None, dtype=torch.bfloat16, is_moe=False, hf_text_config=config, get_hidden_size=lambda: 256
    )
    parallel = types.SimpleNamespace(tensor_parallel_size=1, enable_expert_parallel=False)
    assert facts_of(target, parallel).device == "cpu"  # what the platform here answers
    platform = types.SimpleNamespace(
        is_cuda=lambda: True, get_device_capability=lambda: DeviceCapability(*capability), device_name="NVIDIA A100"
    )
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    reason = DRAFT_WEIGHTS["fp8"].reason_against(facts_of(target, parallel))
    assert reason is None if known else "compute capability 8.9" in reason


def test_the_draft_takes_over_the_linear_layers_that_vllm_leaves_to_pytorch():
    """A layer's quant_method is made with what vLLM chooses for `linear_backend`, PyTorch's linear on CUDA by default;
    shared.py asks for the same choice (vllm_says.toml)."""

    class OnCuda(nn.Parameter):
        is_cuda = True

    def layer(method: Any, weight: nn.Parameter, kind: type = linear.RowParallelLinear) -> nn.Module:
        made = object.__new__(kind)
        nn.Module.__init__(made)
        made.quant_method, made.weight = method, weight
        return made

    config = types.SimpleNamespace(kernel_config=types.SimpleNamespace(linear_backend="auto"))
    assert not multiplies_with_pytorch(config)  # this is a CPU
    with pytest.MonkeyPatch.context() as patch:
        cuda = types.SimpleNamespace(is_rocm=lambda: False, is_cpu=lambda: False, is_cuda=lambda: True)
        patch.setattr(layers, "current_platform", cuda)
        assert multiplies_with_pytorch(config)
    plain = linear.UnquantizedLinearMethod()
    weight = OnCuda(torch.zeros(4, 8), requires_grad=False)
    target = layer(plain, weight)
    changed = on_own_weight(target, "o_proj")
    assert type(changed) is linear.RowParallelLinear and changed.weight is weight
    assert isinstance(changed.quant_method, SharedLinear) and target.quant_method is plain
    left = [
        layer(object(), weight),  # quantised
        layer(plain, nn.Parameter(torch.zeros(4, 8), requires_grad=False)),  # on the CPU
        layer(plain, OnCuda(torch.zeros(4, 8, 2), requires_grad=False)),
        layer(plain, weight, nn.Linear),
    ]
    assert [on_own_weight(each, "o_proj") for each in left] == [None] * 4


# ---- Names of vLLM's that begin with an underscore, which it may change without a word: the plugin uses these and


PACKAGE = Path(selfspec_cli.__file__).parent
PLUGIN = PACKAGE / "vllm_plugin"
USED = {
    "_set_cudagraph_sizes": "chooses the sizes of graphs, and nothing public comes after it and before they are used",
    "_init_candidates": "plans the graphs of a manager",
    "_candidates": "graphs for a step, by its tokens",
    "_capture_descs": "graphs to be captured",
    "_custom_ops": "the module of vLLM's operators, which its own layers import under this name",
}
"""Name -> why there is no public one."""
OF_OTHERS = {
    "torch.nn.Module": {"_modules", "_parameters", "_buffers"},
    "torch": {"_subclasses", "_unsafe_view", "_dynamo"},
    "argparse.ArgumentParser": {"_actions"},
    "a named tuple": {"_replace"},
    "triton.runtime.interpreter": {"_patch_lang", "_LangPatchScope", "_get_np_dtype"},
}
PRIVATE = re.compile(r"(?<![A-Za-z0-9_`])_[a-z][a-z_]*\b")
LISTS = ("patches.py", "subclasses.py", "releases/__init__.py")
"""Files whose strings name what is used of vLLM."""


def used(node: ast.AST, strings: bool) -> Iterator[str]:
    """Private names in a file: attributes, and imports from vLLM; with `strings`, names in these too."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and re.match(r"_[a-zA-Z]", part.attr):
            yield part.attr
        elif isinstance(part, ast.ImportFrom) and "vllm" in (part.module or ""):
            yield from (alias.name for alias in part.names if alias.name.startswith("_"))
        elif strings and isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield from PRIVATE.findall(part.value)


def defined(node: ast.AST) -> Iterator[str]:
    """Names that a file gives to something of ours."""
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield part.name
        elif isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
            yield part.id if isinstance(part, ast.Name) else part.attr


def ours() -> set[str]:
    found = {name for file in PLUGIN.rglob("*.py") for name in defined(ast.parse(file.read_text(encoding="utf-8")))}
    return {name for name in found if name.startswith("_")} - USED.keys()


def of_vllm(source: str, known: set[str], strings: bool = True) -> set[str]:
    return set(used(ast.parse(source), strings)) - known - set().union(*OF_OTHERS.values())


def test_the_plugin_uses_five_private_names_of_vllms():
    known = ours()
    seams = (PLUGIN / "releases" / "seams.toml").read_text(encoding="utf-8")
    found = of_vllm(f"SEAMS = {seams!r}", known)
    for file in PLUGIN.rglob("*.py"):
        found |= of_vllm(file.read_text(encoding="utf-8"), known, str(file.relative_to(PLUGIN)) in LISTS)
    assert found == set(USED) and len(USED) <= 5


def test_no_private_name_of_ours_is_one_of_a_class_that_it_is_added_to(vllm):
    """A method of ours would override one of vLLM's by accident, and hide that it is used."""
    for base, files in {
        V1_PROPOSER: ["v1/proposer.py"],
        V2_SPECULATOR: ["v2/draft_loop.py", "v2/speculator.py"],
        "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager": ["v2/graphs.py"],
    }.items():
        mine = {name for file in files for name in defined(ast.parse((PLUGIN / file).read_text(encoding="utf-8")))}
        theirs = {name for name in vllm.attributes(base) if name.startswith("_")}
        assert {name for name in mine & theirs if not name.startswith("__")} <= set(USED), base


@pytest.mark.parametrize(
    "planted",
    [
        "runner._update_states(1)",
        'Patch("vllm.v1.engine.core:EngineCore._initialize_kv_caches")',
        "from vllm.v1.engine.core import _warm_up",
        'ATTRIBUTES = {"Class": "graphs _pool_of_graphs"}',
    ],
)
def test_another_private_name_is_found(planted):
    assert len(of_vllm(planted, ours())) == 1
