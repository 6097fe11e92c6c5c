"""Which stop tokens vLLM's own processor of min_tokens forbids for the token behind a round; starts no engine."""

from types import SimpleNamespace

import pytest
import torch
from v1_metadata import metadata_of
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.logits_processor.state import LogitsProcessors
from vllm.v1.sample.sampler import Sampler

from selfspec_cli.vllm_plugin.v1.sampling import _with_drafts_counted, bonus_token_after_drafts

pytestmark = pytest.mark.contract

VOCAB = 8
STOPS = {0: {1}, 1: {2, 3}, 3: {4}}
"""Stop tokens of the requests in rows 0, 1 and 3; the one in row 2 has no min_tokens."""


def metadata(drafts, written=(5, 2, 9, 3), least=6):
    """What vLLM's sampler gets for four requests with so many tokens written, and with min_tokens."""
    processor = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
    added = [
        (
            row,
            SimpleNamespace(min_tokens=least, all_stop_token_ids=stops, structured_outputs=None),
            [],
            [7] * written[row],
        )
        for row, stops in STOPS.items()
    ]
    processor.update_state(BatchUpdate(batch_size=4, removed=[], added=added, moved=[]))
    return processor, metadata_of(
        temperature=None,
        all_greedy=True,
        all_random=False,
        output_token_ids=[[7] * count for count in written],
        spec_token_ids=drafts,
        logitsprocs=LogitsProcessors([processor]),
    )


def forbidden(function, given, bonus=True):
    """(row, token) pairs that `function`, an `apply_logits_processors`, forbids."""
    logits = function(Sampler(), torch.zeros(4, VOCAB), given, bonus)
    return {(row, token) for row, token in logits.isneginf().nonzero().tolist()}


@pytest.fixture
def theirs():
    """vLLM's own function, also after another test has replaced it."""
    found = Sampler.apply_logits_processors
    while getattr(found, "__closure__", None) and found.__module__.startswith("selfspec_cli"):
        found = next(cell.cell_contents for cell in found.__closure__ if callable(cell.cell_contents))
    return found


ALL = {(row, token) for row, stops in STOPS.items() for token in stops}


@pytest.mark.parametrize(
    ("drafts", "want"),
    [
        ([[], [], [], []], ALL),
        ([[5], [5], [], []], ALL - {(0, 1)}),  # 5 + 1 tokens reach 6, 2 + 1 do not
        ([[], [5] * 4, [5] * 4, [5] * 2], ALL - {(1, 2), (1, 3)}),  # 2 + 4 reach it, 3 + 2 do not
        ([[-1], [-1] * 4, [], [-1] * 3], set()),  # -1: drafted, and not yet known to the host
    ],
)
def test_a_stop_token_is_forbidden_while_the_drafts_before_it_are_too_few(theirs, drafts, want):
    processor, given = metadata(drafts)
    ours = bonus_token_after_drafts(theirs)
    assert forbidden(ours, given) == want
    assert forbidden(ours, given, bonus=False) == ALL  # a request without drafts: its next token is no bonus
    assert forbidden(theirs, given) == ALL  # the fault, and that ours has changed nothing of vLLM's
    assert set(processor.min_toks) == set(STOPS)
    assert given.logitsprocs.non_argmax_invariant == [processor]


def test_without_min_tokens_nothing_is_copied():
    _, given = metadata([[5]] * 4, written=(6, 7, 8, 9))
    assert _with_drafts_counted(given) is given
    _, given = metadata(None)
    assert _with_drafts_counted(given) is given
