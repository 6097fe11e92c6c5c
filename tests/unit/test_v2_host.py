"""What the V2 runner records of a verdict, and the text of the device function of every gate's statistic, run as plain
Python with torch for Triton."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from selfspec_cli.early_exit.gates import GATES, device_features
from selfspec_cli.vllm_plugin.subclasses import overriding
from selfspec_cli.vllm_plugin.v2.runner import with_short_drafts
from selfspec_cli.vllm_plugin.v2.state import DeviceRecorder


def batch(verified, requests):
    """What vLLM's InputBatch says of a verify pass; verified: places of each request that held a draft."""
    ends = np.cumsum([0, *(places + 1 for places in verified)])
    return SimpleNamespace(
        req_ids=[f"r{number}" for number in requests],
        idx_mapping=torch.tensor(requests),
        num_draft_tokens_per_req=np.full(len(verified), 3, dtype=np.int32),  # what the scheduler asked for
        cu_num_logits=torch.tensor(ends, dtype=torch.int32),
    )


def state(lengths):
    statistics = torch.arange(len(lengths) * 3 * 2, dtype=torch.float32).reshape(len(lengths), 3, 2)
    drafted = torch.tensor(lengths, dtype=torch.int32)
    return SimpleNamespace(matches=SimpleNamespace(drafted=drafted), statistics=statistics)


def test_the_record_holds_what_was_drafted_and_verified():
    recorder, drafts = DeviceRecorder(), state([3, 1, 3])
    # Request 2 drafted three tokens, of which one was verified; request 1 drafted one of three.
    # vLLM's tensors may be longer than the batch: what stands behind it belongs to nobody.
    recorder.verdict(batch([3, 3, 1], [0, 1, 2]), torch.tensor([3, 2, 1, 4]), drafts)
    drafts.matches.drafted.zero_()  # the next round begins; the record keeps what it saw
    log = recorder.plain()
    assert (log["drafted"], log["accepted"], log["request"]) == ([3, 1, 1], [2, 1, 0], [0, 1, 2])
    assert log["statistics"] == [
        drafts.statistics[0].tolist(),
        drafts.statistics[1, :1].tolist(),
        drafts.statistics[2, :1].tolist(),
    ]


def test_what_nobody_drafted_or_verified_is_not_in_the_record():
    recorder = DeviceRecorder()
    prefill = SimpleNamespace(num_draft_tokens_per_req=None)
    recorder.verdict(prefill, torch.tensor([1]), state([0]))
    recorder.verdict(batch([3, 0, 3], [0, 1, 2]), torch.tensor([1, 1, 0]), state([0, 3, 3]))
    log = recorder.plain()
    assert log.pop("features") == list(device_features())
    assert log == {"statistics": [], "drafted": [], "accepted": [], "request": []}


def test_an_engine_without_lengths_verifies_as_it_did():
    class Original:
        sampler = SimpleNamespace(req_states=SimpleNamespace())

        def __call__(self, *given):
            return given

    given = ("logits", "batch", "draft logits", "invalid drafts")
    assert overriding(Original, {"__call__": with_short_drafts})()(*given) == given


# ---- the text of the statistics --------------------------------------------------------------------------------------


LANGUAGE = SimpleNamespace(
    float32=torch.float32,
    full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
    where=torch.where,
    load=lambda place, mask, other: BEFORE[place] if mask else other,
)
BEFORE = [9.0, 0.5, 9.0]  # what each gate's statistic was at the step before


@pytest.fixture
def of_statistics():
    pytest.importorskip("triton")
    from selfspec_cli.vllm_plugin.v2 import worth as statistics

    return statistics


@pytest.mark.parametrize(("later", "survival"), [(True, 0.25 * 0.5), (False, 0.25)])
def test_each_gate_has_its_own_column_and_a_cumulative_one_reads_the_step_before(of_statistics, later, survival):
    names = {"triton": SimpleNamespace(jit=lambda function: function), "tl": LANGUAGE}
    exec(of_statistics.source([GATES["entropy"], GATES["survival"], GATES["maxp"]]), names)
    draft = {"confidence": 0.25, "second": 0.2, "entropy": 1.5, "varentropy": 2.0, "logit": 3.0, "logsumexp": 4.0}
    values = names["statistics"](torch.arange(4), **draft, before=0, later=later)
    assert values.tolist() == [1.5, survival, 0.25, 0.0]


def test_triton_finds_the_text_of_what_it_compiles(of_statistics):
    text = of_statistics.source(GATES[name] for name in of_statistics.FEATURES)
    assert inspect.getsource(of_statistics.compiled(text).fn) == text
