"""Which requests of a round draft on, against the plain rule; imports the proposer (and so vLLM), starts no engine."""

import random
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.contract


def test_requests_draft_on_while_their_gate_is_open_and_the_model_has_room():
    from selfspec_cli.vllm_plugin.v1_proposer import _EarlyExit, _Round

    draw = random.Random(0)
    for _ in range(300):
        count, last = draw.randrange(1, 6), 20
        starts = torch.tensor([draw.randrange(8, last) for _ in range(count)])
        proposer = SimpleNamespace(_last_useful=last)
        state = _Round(torch.arange(count), starts.int(), starts.clone(), room=last - int(starts.max()))
        want = list(range(count))
        for steps in range(1, 12):
            state.positions = state.positions + 1
            closed = {row for row in want if draw.random() < 0.15}
            open_ = None if not closed and draw.random() < 0.5 else torch.tensor([row not in closed for row in want])
            want = [row for row in want if row not in closed and int(starts[row]) + steps < last]
            went = _EarlyExit._go_on(proposer, state, open_, steps)
            assert went == bool(want)
            if not want:
                break
            assert state.rows.tolist() == want
            assert state.positions.tolist() == [int(starts[row]) + steps for row in want]
