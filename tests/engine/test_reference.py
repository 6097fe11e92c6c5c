"""vLLM drafts, gates and accepts what the method in plain PyTorch does, round by round: early_exit/reference.py."""

from functools import partial

import pytest
from harness import differing, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB
from safetensors.torch import load_file

from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.reference import Decoder, Round, always, confident, generate

pytestmark = pytest.mark.engine

K, LENGTH = 5, 40
PROMPTS = ragged_prompts(8, VOCAB, seed=8)
CASES = [(LAYERS // 2, K, None), (LAYERS // 2, K, 0.3), (2, 3, 0.2), (LAYERS - 1, 1, None)]


def test_every_round_is_the_references(model_dir, report):
    """Greedy, from the same weights, in a batch of eight beside the reference's one request at a time."""
    path = model_dir("llama")
    model = Decoder(load_file(path / "model.safetensors"), LAYERS, head_dim=32)
    with live(path, layer_skip(LAYERS // 2, K)) as engine:
        for layer, k, threshold in CASES:
            engine.call("early_exit_set_view", {"layer_skip": layer})
            engine.call("early_exit_set_draft_length", k)
            engine.call("early_exit_set_gate", *(("none", None) if threshold is None else ("maxp", threshold)))
            engine.call("early_exit_record", True)
            got = tokens(engine.generate(PROMPTS, greedy(LENGTH)))
            log = DraftLog.from_plain(engine.call("early_exit_recorded"), K)
            gate = always if threshold is None else confident(threshold)
            draft = partial(model, layers=layer)
            want = [
                generate(model, draft, model.new_cache(len(prompt) + LENGTH + 2 * K), prompt, LENGTH, k, gate)
                for prompt in PROMPTS
            ]
            assert not differing(got, [text for text, _ in want])
            rounds = {tuple(made) for _, made in want}
            assert {tuple(rounds_of(log, number)) for number in range(len(PROMPTS))} == rounds
            drafted, accepted = int(log.drafted.sum()), int(log.accepted.sum())
            assert 0 < accepted < drafted
            assert (log.drafted == k).all() == (threshold is None)
            report(f"E={layer} k={k} maxp>={threshold}: {len(log.drafted)} rounds, {accepted} of {drafted} accepted")


def rounds_of(log: DraftLog, request: int) -> list[Round]:
    own = log.choose(log.request == request)
    return [Round(*pair) for pair in zip(own.drafted.tolist(), own.accepted.tolist(), strict=True)]
