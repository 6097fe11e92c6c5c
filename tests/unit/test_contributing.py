"""CONTRIBUTING.md says which files an addition touches; here each is added, or counted, to see that no other is."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from selfspec_cli.early_exit.contexts import CONTEXTS
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.heads import HEADS
from selfspec_cli.load_patterns import PATTERNS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "selfspec_cli"

# Words that other files may know: what nothing is chosen by, the one gate that maps another's statistic, and a value of
# other settings, too.
NEUTRAL = {"none", "shared", "lens", "full", "auto"}
REGISTRIES = {
    "gates": (GATES, "early_exit/gates"),
    "heads": (HEADS, "early_exit/heads"),
    "draft_weights": (DRAFT_WEIGHTS, "early_exit/draft_weights"),
    "contexts": (CONTEXTS, "early_exit/contexts"),
    "load_patterns": (PATTERNS, "load_patterns"),
}
NAMES = [(folder, name) for folder, (registry, *_) in REGISTRIES.items() for name in registry if name not in NEUTRAL]


@cache
def literals(file: Path) -> set[str]:
    """The strings of a file that are values: not docstrings, and no part of a sentence."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "name"), NAMES)
def test_an_object_of_a_registry_is_named_in_its_own_file_alone(folder, name):
    home = PACKAGE / REGISTRIES[folder][1]
    mentions = [file for file in PACKAGE.rglob("*.py") if name in literals(file) and home not in file.parents]
    # `fit-lsq` is a command of its own, and old .pt heads are lsq; the first sprint's thresholds were these gates'. The
    # greatest probability is what gate `auto` learns from, and copies of either width are what drafts by default.
    others = {
        "maxp": {"sprint_aliases.py", "worth.py"},
        "int4": {"defaults.py", "target_facts.py"},
        "int8": {"defaults.py"},
        "varH": {"sprint_aliases.py"},
        "lsq": {"fit.py", "head_metadata.py", "model_files.py"},
        "window": {"ppl.py", "window.py"},
        "trace": {"profile.py"},
    }
    allowed = others.get(name, set())  # windows of a text that is scored; a trace of a GPU
    assert {file.name for file in mentions} <= allowed


@pytest.mark.parametrize("folder", REGISTRIES)
def test_the_page_names_the_file_that_an_addition_needs(folder):
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    registry, file = REGISTRIES[folder]
    assert f"selfspec_cli/{file}/NAME.py" in page
    assert f"`{folder}.base.{registry.kind.__name__}`" in page
    assert f"`selfspec.{folder}`" in page


def test_every_file_that_the_page_names_is_there():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:selfspec_cli|tests|docs)/[\w/.]+)`", page)
    assert len(named) > 10
    for name in named:
        assert (ROOT / name).is_file() or ("NAME" in name and (ROOT / name).parent.is_dir()), name


NEW_SETTING = """
    patience: int = knob(
        0, help="a setting of a test", low=0, high=9, spec_keys=("patience",), methods=DRAFTING, arm=True, rare=True
    )
"""
ASKED_OF_IT = """
from selfspec_cli.config.tuned import overrides
from selfspec_cli.config import options
from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.early_exit.settings import to_spec
from selfspec_cli.record.tables import planned

def refused(make, *words):
    try:
        make()
    except (ConfigError, SettingsError) as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(words)

plain, new = compose_runs(None, ["layer=3", "patience=0,2"])
assert Keys().engine(plain) != Keys().engine(new) and Keys().arm(plain) != Keys().arm(new)
assert "patience=2" in overrides(new) and planned(new).E == 3
assert to_spec(new)["patience"] == 2 and ResolvedSettings.from_user(to_spec(new), 8).patience == 2
assert "patience" in options.RARE and "patience" in [row.key for row in options.rows(rare=True)]
refused(lambda: compose_runs(None, ["patience=10"]), "patience=10", "from 0 to 9")
refused(lambda: compose_runs(None, ["patience=two"]), "patience", "whole number")
refused(lambda: compose_runs(None, ["patiense=2"]), "did you mean 'patience'?")
refused(lambda: compose_runs(None, ["method=skip", "patience=2"]), "not used by method 'skip'")
refused(lambda: ResolvedSettings.from_user({"method": "skip", "patience": 2}, 8), "not used by method 'skip'")
"""


@pytest.mark.slow
def test_a_setting_of_drafting_is_added_in_one_file(tmp_path):
    """To a copy of the package in which settings.py alone is another file."""
    changed = Path("early_exit", "settings.py")
    for folder in (Path(), changed.parent):
        (tmp_path / "selfspec_cli" / folder).mkdir()
        for file in (PACKAGE / folder).iterdir():
            if (folder / file.name) not in (changed, changed.parent):
                (tmp_path / "selfspec_cli" / folder / file.name).symlink_to(file)
    for name in ("conf", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    before, mark, after = (PACKAGE / changed).read_text(encoding="utf-8").partition("    strict: bool = knob(")
    (tmp_path / "selfspec_cli" / changed).write_text(f"{before}{NEW_SETTING}{mark}{after}", encoding="utf-8")
    command, environment = [sys.executable, "-c", ASKED_OF_IT], os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
