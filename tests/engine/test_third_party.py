"""A head and a gate from somebody else's package (tests/packages/toy): found by its entry points, fitted, saved, loaded
and swept in vLLM, with no edit of selfspec."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import layer_skip, live
from models import LAYERS
from test_fit_heads import config

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.head_metadata import read_metadata
from selfspec_cli.early_exit.head_spec import HeadSpec, examples
from selfspec_cli.early_exit.heads import HEADS
from selfspec_cli.stages import fit

pytestmark = pytest.mark.engine

EXIT, SOME = LAYERS // 2, range(0, 32, 4)
TOY = Path(__file__).parents[1] / "packages" / "toy"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package is installed: its folder, with its metadata, is on the path."""

    def forget() -> None:
        for registry in (HEADS, GATES):
            vars(registry).pop("_loaded", None)

    monkeypatch.syspath_prepend(str(TOY))
    forget()
    yield
    forget()


def test_a_head_of_another_package_is_fitted_saved_and_drafts(toy, expected, tmp_path):
    want, names = expected("llama"), ("lens", "one_direction", "one_direction_kl", "translator_r1")
    assert "one_direction" in examples()
    done = fit.run(
        config(want.path, tmp_path), layers=[EXIT], heads=names, pairs=2000, ridge=1e-3, corpus="random", replay=4
    )
    found = {report["head"]: report for report in done.reports}
    assert found["one_direction"]["agreement"] == pytest.approx(found["translator_r1"]["agreement"], abs=0.01)
    for name in names[1:3]:
        path = found[name]["path"]
        assert read_metadata(path).spec == HeadSpec.from_name(name)
        assert found[name]["parameters"] == 2 * 64
        spec = layer_skip(EXIT, 3, head_path=path, gate="ratio", threshold=0.8)
        with live(want.path, spec) as engine:
            want.check(engine, SOME)
            counts = engine.counts()
            counts.require_both_verdicts()
            assert counts.drafted < 3 * counts.rounds  # the gate ended some drafts


def test_without_the_package_its_heads_are_unknown(expected, tmp_path):
    with pytest.raises(SettingsError, match="'one_direction' is not known"):
        HeadSpec.from_name("one_direction")
