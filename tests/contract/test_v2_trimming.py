"""Adaptive verification from a number of running requests on: vLLM's own manager, as far as it needs no device."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")
NAMES = ["a", "b", "c"]
SCHEDULED = {"a": 5, "b": 5, "c": 7}
DRAFTS = {"a": [0] * 4, "b": [0] * 4}


class Stale:
    def __init__(self, requests, k):
        self.np = np.full((requests, k), 0.2, dtype=np.float32)


def manager(most=100):
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

    made = AdaptiveVerificationManager.__new__(AdaptiveVerificationManager)
    states = SimpleNamespace(
        req_id_to_index={name: number for number, name in enumerate(NAMES)}, num_computed_tokens_np=np.zeros(3),
        prefill_len=SimpleNamespace(np=np.zeros(3)),
    )  # fmt: skip
    made.req_states, made.num_speculative_steps, made.num_bonus_tokens, made._max_total_logits = states, 4, 1, most
    # Another verified token costs as much as a whole step: no draft pays.
    made.cost_tables = (np.ones(10), np.arange(1, 200, dtype=np.float64))
    made._stale_confidences, made._stale_idx = [Stale(3, 4), Stale(3, 4)], 0
    made._pending_resets, made._copy_events = [1], [SimpleNamespace(query=lambda: True) for _ in range(2)]
    made._batch_budget = None
    return made


def tokens(made):
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

    from selfspec_cli.vllm_plugin.v2.trimming import trim_under_load

    original = getattr(AdaptiveVerificationManager.get_num_tokens, "__wrapped__",
                       AdaptiveVerificationManager.get_num_tokens)  # fmt: skip
    return trim_under_load(original)(made, SCHEDULED, DRAFTS)


def test_below_that_load_every_draft_is_verified():
    from selfspec_cli.vllm_plugin.v2.trimming import trim_from

    made = manager()
    assert tokens(made) < 17  # without a number, as vLLM does it: drafts that do not pay are left out
    assert made._batch_budget[2] < 8
    trim_from(made.req_states, 4)
    assert tokens(made) == 17
    drafts, others, budget = made._batch_budget
    assert (drafts, others, budget) == ({"a": 4, "b": 4, "c": 0}, {"a": 1, "b": 1, "c": 7}, 8)
    # What vLLM does next with a budget of all drafts: nothing is compacted.
    scheduled, logits = np.array([5, 5, 7]), np.array([0, 5, 10, 11])
    assert made.compact_batch(np.array([4, 4, 0]), scheduled, logits)[0] is scheduled
    trim_from(made.req_states, 3)
    assert tokens(made) < 17


def test_a_step_of_too_many_logits_is_trimmed_at_any_load():
    from selfspec_cli.vllm_plugin.v2.trimming import trim_from

    made = manager(most=6)
    trim_from(made.req_states, 100)
    assert tokens(made) < 17


def test_a_draft_loop_costs_what_it_took_lately():
    from selfspec_cli.vllm_plugin.v2.trimming import price_drafts_by, trim_from

    made, took = manager(), [None]
    verify = made.cost_tables[1]
    price_drafts_by(made.req_states, SimpleNamespace(seconds=lambda: took[0]))
    assert tokens(made) == 9 and made.cost_tables[0].tolist() == [1.0] * 10  # before there is one: as vLLM timed it
    took[0] = 0.5
    # Beside a loop of 500 ms, the first three drafts of each request are worth the 1 ms that one takes to verify.
    assert tokens(made) == 15
    assert made.cost_tables[0].tolist() == [500.0] * 10 and made.cost_tables[1] is verify
    took[0] = 0.25
    trim_from(made.req_states, 100)
    assert tokens(made) == 17 and made.cost_tables[0][0] == 500.0  # nothing is ranked


def test_below_that_load_nothing_is_copied_and_new_requests_are_not_forgotten():
    from selfspec_cli.vllm_plugin.v2.trimming import remember_under_load, trim_from

    made, called = manager(), []
    remember = remember_under_load(lambda *arguments: called.append(arguments))
    trim_from(made.req_states, 4)
    remember(made, None, SimpleNamespace(num_reqs=3))
    assert not called and made._pending_resets == []
    assert made._stale_confidences[1].np[1].tolist() == [1.0] * 4 and made._stale_confidences[1].np[0, 0] < 0.3
    remember(made, None, SimpleNamespace(num_reqs=4))
    assert len(called) == 1
    made._pending_resets = [0]
    made._copy_events[1].query = lambda: False  # a copy is on its way: not now
    remember(made, None, SimpleNamespace(num_reqs=3))
    assert made._pending_resets == [0]
