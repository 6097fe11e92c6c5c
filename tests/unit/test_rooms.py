"""What READMEs and docstrings say of files is true: each that is named is there, each room and module is listed."""

import ast
import re
from pathlib import Path

import pytest

import selfspec_cli
from selfspec_cli import vllm_plugin

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "selfspec_cli"
SOURCES = [
    file for folder in ("selfspec_cli", "tests", "experiments") for file in sorted((ROOT / folder).rglob("*.py"))
]
PAGES = [
    ROOT / "README.md",
    ROOT / "ee_head" / "README.md",
    ROOT / "experiments" / "reference_model" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
ELSEWHERE = {"config/model.py", "argparse.py", "json/decoder.py", "platforms/cpu.py", "compilation/decorators.py"} | {
    "compilation/caching.py",
    "models/modeling_utils.py",
    "speculative/drafter.py",
    "speculative/save_hidden_state.py",
    "speculative/speculation_gate.py",
    "speculative/utils.py",
    "tests/v1/spec_decode/test_custom_speculator.py",
}  # of vLLM, of Python and of TensorRT-LLM


def docstrings(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return "\n".join(ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds))


def named(text):
    """Python files that a text names, such as weights/gemv.py; REVISION:PATH is one of the history."""
    return set(re.findall(r"(?<![\w./<:-])[a-z][\w/]*\.py\b", text)) - ELSEWHERE


def is_there(name, near):
    places = (ROOT, PACKAGE, near, near.parent)
    return any((place / name).is_file() for place in places) or any(f"/{file}".endswith(f"/{name}") for file in SOURCES)


@pytest.mark.parametrize("file", [*PAGES, *(PACKAGE.rglob("*.py"))], ids=lambda file: str(file.relative_to(ROOT)))
def test_every_file_that_is_named_is_there(file):
    text = file.read_text(encoding="utf-8") if file.suffix == ".md" else docstrings(file)
    assert [name for name in sorted(named(text)) if not is_there(name, file.parent)] == []


def test_every_room_has_a_line():
    rooms = [folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file()]
    assert len(rooms) >= 10
    for room in rooms:
        assert re.search(rf"^    {room}/ ", selfspec_cli.__doc__, re.M), room
        assert (PACKAGE / room / "__init__.py").read_text(encoding="utf-8").startswith('"""'), room


def test_every_module_of_the_plugin_is_listed():
    """In the plugin's docstring or in that of the module's own folder; registries have a module for each entry."""
    folder = PACKAGE / "vllm_plugin"
    modules = [file for file in folder.rglob("*.py") if file.name != "__init__.py"]
    assert len(modules) > 60
    for file in modules:
        if file.parent.name in ("releases", "contexts"):
            continue
        near = docstrings(file.parent / "__init__.py")
        assert file.name in named(vllm_plugin.__doc__) | named(near), file
