"""A gate from another package (tests/packages/toy), found by its entry point, drafts on a live engine and is recorded
like one of ours. test_third_party.py has the command line, and the package's head."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness import Live, differing, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB

from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.replay import Setting, draft_lengths

pytestmark = pytest.mark.engine

K, LENGTH = 5, 40
PROMPTS = ragged_prompts(8, VOCAB, seed=5)
TOY = Path(__file__).parents[1] / "packages" / "toy"


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    """The package on the path, with its metadata, and the registry as a new process would read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOY))
        vars(GATES).pop("_loaded", None)
        assert "ratio" in GATES, GATES.broken
        yield
    vars(GATES).pop("_loaded", None)


@pytest.fixture(scope="module")
def plain(model_dir) -> list[list[int]]:
    with live(model_dir("llama")) as engine:
        return tokens(engine.generate(PROMPTS, greedy(LENGTH)))


@pytest.fixture(scope="module")
def drafting(installed, plain, model_dir) -> Iterator[Live]:
    """Started with the gate in vLLM's own words."""
    with live(model_dir("llama"), layer_skip(LAYERS // 2, K, gate="ratio", threshold=0.5)) as engine:
        yield engine


def recorded(engine: Live, plain: list[list[int]]) -> DraftLog:
    engine.call("early_exit_record", True)
    outputs = tokens(engine.generate(PROMPTS, greedy(LENGTH)))
    assert not differing(outputs, plain)
    return DraftLog.from_plain(engine.call("early_exit_recorded"), K)


def test_a_sweep_over_its_threshold_is_lossless_and_recorded(drafting, plain):
    drafted = []
    for threshold in (None, 0.2, 0.5, 0.8, 1.0):
        if threshold is not None:  # the first point is as the engine was started
            drafting.call("early_exit_set_gate", "ratio", threshold)
        log = recorded(drafting, plain)
        # What was recorded is the gate's own definition, in terms of what other gates recorded beside it.
        maxp, margin, ratio = (log.feature(name)[log.was_drafted] for name in ("maxp", "margin", "ratio"))
        torch.testing.assert_close(ratio, (maxp - margin) / maxp, atol=1e-5, rtol=1e-4)
        assert torch.equal(draft_lengths(log, Setting("ratio", threshold or 0.5, K)), log.drafted)
        drafted.append(float(log.drafted.float().mean()))
    assert drafted[0] == drafted[2]
    assert drafted[1] < drafted[2] < drafted[3] < drafted[4] == pytest.approx(K, rel=0.1)
