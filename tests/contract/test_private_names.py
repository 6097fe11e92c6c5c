"""Names of vLLM's that begin with an underscore, which it may change without a word: the plugin uses these and no more.

They are looked for in the plugin's source: what is imported, named in a string (a target of patches.py, an entry of
releases/seams.py), overridden by a method, or read or set on an object.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import selfspec_cli

pytestmark = pytest.mark.contract

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
LISTS = ("patches.py", "subclasses.py", "vllm_names.py", "releases/seams.py", "releases/__init__.py")
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
    found = set()
    for file in PLUGIN.rglob("*.py"):
        found |= of_vllm(file.read_text(encoding="utf-8"), known, str(file.relative_to(PLUGIN)) in LISTS)
    assert found == set(USED) and len(USED) <= 5


@pytest.mark.parametrize("release", ["0.32.0", "0.33.0"])
def test_no_private_name_of_ours_is_one_of_a_class_that_it_is_added_to(release):
    """A method of ours would override one of vLLM's by accident, and hide that it is used."""
    from vllm_source import VARIABLE, Source, folder_of, sources

    from selfspec_cli.vllm_plugin.releases.seams import V1_PROPOSER, V2_SPECULATOR

    folder = folder_of(release)
    if folder is None:
        pytest.skip(f"vLLM {release} is neither installed nor under {sources()} (${VARIABLE})")
    for base, files in {
        V1_PROPOSER: ["v1/proposer.py"],
        V2_SPECULATOR: ["v2/draft_loop.py", "v2/speculator.py"],
        "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager": ["v2/graphs.py"],
    }.items():
        mine = {name for file in files for name in defined(ast.parse((PLUGIN / file).read_text(encoding="utf-8")))}
        theirs = {name for name in Source(folder).attributes(base) if name.startswith("_")}
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
