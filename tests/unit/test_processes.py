"""What tests/processes/sitecustomize.py keeps for all processes is what each would find."""

import runpy
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "processes" / "sitecustomize.py"


def test_a_result_is_kept_for_the_same_call_and_path_alone(tmp_path, monkeypatch):
    calls = []

    def find(*args, **more):
        calls.append((args, more))
        return {"args": args, **more}

    found_once = runpy.run_path(str(FILE))["found_once"]
    one, other = found_once(find, tmp_path), found_once(find, tmp_path)
    assert one(1, prefix="a") == other(1, prefix="a") == {"args": (1,), "prefix": "a"}
    assert len(calls) == 1
    assert other(1, prefix="b") == {"args": (1,), "prefix": "b"}
    monkeypatch.syspath_prepend(tmp_path)
    one(1, prefix="a")
    assert len(calls) == 3


@pytest.mark.slow
def test_transformers_finds_the_classes_that_it_has(monkeypatch):
    transformers = pytest.importorskip("transformers")
    from transformers.utils import import_utils

    own, kept = import_utils.define_import_structure.__wrapped__, import_utils.define_import_structure
    folder = Path(transformers.__file__).parent / "models" / "llama"
    assert kept(folder) == kept(folder) == own(folder) != {}
    packages = sys.modules["importlib.metadata"].packages_distributions
    assert packages() == packages.__wrapped__()
