"""A head and a gate from somebody else's package (tests/packages/toy): found by its entry points, fitted, saved and
loaded in vLLM, with no edit of selfspec."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import layer_skip, live
from models import LAYERS
from test_fit_heads import config

from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.head_metadata import read_metadata
from selfspec_cli.early_exit.head_spec import HeadSpec, examples
from selfspec_cli.early_exit.heads import HEADS
from selfspec_cli.early_exit.replay import Setting, draft_lengths
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
    want, names = expected("llama"), ("lens", "one_direction", "translator_r1")
    assert "one_direction" in examples()
    done = fit.run(config(want.path, tmp_path), layers=[EXIT], heads=names, pairs=2000, ridge=1e-3, corpus="random")
    found = {report["head"]: report for report in done.reports}
    assert found["one_direction"]["agreement"] == pytest.approx(found["translator_r1"]["agreement"], abs=0.01)
    for name in names[1:2]:
        path = found[name]["path"]
        assert read_metadata(path).spec == HeadSpec.from_name(name)
        assert found[name]["parameters"] == 2 * 64
        spec = layer_skip(EXIT, 3, head_path=path, gate="ratio", threshold=0.8)
        with live(want.path, spec) as engine:
            counts = want.check(engine, SOME)
            counts.require_both_verdicts()
            assert counts.drafted < 3 * counts.rounds  # the gate ended some drafts


def test_a_sweep_over_a_gates_threshold_is_lossless_and_recorded(toy, expected):
    """The gate of another package is recorded like one of ours."""
    want, k, drafted = expected("llama"), 5, []
    with live(want.path, layer_skip(EXIT, k, gate="ratio", threshold=0.5)) as engine:
        for threshold in (None, 0.2, 0.5, 0.8, 1.0):
            if threshold is not None:  # the first point is as the engine was started
                engine.call("early_exit_set_gate", "ratio", threshold)
            engine.call("early_exit_record", True)
            want.check(engine, SOME)
            log = DraftLog.from_plain(engine.call("early_exit_recorded"), k)
            # What was recorded is the gate's own definition, in terms of what other gates recorded beside it.
            maxp, margin, ratio = (log.feature(name)[log.was_drafted] for name in ("maxp", "margin", "ratio"))
            torch.testing.assert_close(ratio, (maxp - margin) / maxp, atol=1e-5, rtol=1e-4)
            assert torch.equal(draft_lengths(log, Setting("ratio", threshold or 0.5, k)), log.drafted)
            drafted.append(float(log.drafted.float().mean()))
    assert drafted[0] == drafted[2]
    assert drafted[1] < drafted[2] < drafted[3] < drafted[4] == pytest.approx(k, rel=0.1)
