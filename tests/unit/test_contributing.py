"""CONTRIBUTING.md says which files an addition touches; here each is added, or counted, to see that no other is."""

import ast
import re
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
NEUTRAL = {"none", "calibrated", "shared", "lens", "full", "auto"}
REGISTRIES = {
    "gates": (GATES, "GATE", "early_exit/gates"),
    "heads": (HEADS, "HEAD", "early_exit/heads"),
    "draft_weights": (DRAFT_WEIGHTS, "WEIGHTS", "early_exit/draft_weights"),
    "contexts": (CONTEXTS, "CONTEXT", "early_exit/contexts"),
    "load_patterns": (PATTERNS, "PATTERN", "load_patterns"),
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
    home = PACKAGE / REGISTRIES[folder][2]
    mentions = [file for file in PACKAGE.rglob("*.py") if name in literals(file) and home not in file.parents]
    # `fit-lsq` is a command of its own, and old .pt heads are lsq; the first sprint's thresholds were these gates'. The
    # greatest probability is what gate `auto` learns from, and copies of either width are what drafts by default.
    others = {
        "maxp": {"sprint_aliases.py", "worth.py"},
        "int4": {"defaults.py", "target_facts.py"},
        "int8": {"defaults.py"},
        "varH": {"sprint_aliases.py"},
        "lsq": {"fit.py", "head_metadata.py", "head_files.py"},
        "window": {"ppl.py", "trace.py", "window.py"},
    }
    allowed = others.get(name, set())  # windows of a text that is scored, and of a profile's time
    assert {file.name for file in mentions} <= allowed


@pytest.mark.parametrize("folder", REGISTRIES)
def test_the_page_names_the_file_that_an_addition_needs(folder):
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, attribute, file = REGISTRIES[folder]
    assert f"selfspec_cli/{file}/NAME.py" in page
    assert f"`{attribute}`" in page
    assert f"`selfspec.{folder}`" in page


def test_every_file_that_the_page_names_is_there():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:selfspec_cli|tests|docs)/[\w/.]+)`", page)
    assert len(named) > 10
    for name in named:
        if "NAME" in name:
            assert (ROOT / name).parent.is_dir(), name
        else:
            assert (ROOT / name).is_file(), name
