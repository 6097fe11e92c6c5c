import pytest
import torch
from all_statistics import all_statistics

from selfspec_cli.early_exit.draft_log import DraftLog, DraftRecorder
from selfspec_cli.early_exit.gates import features


def logits(*seeds):
    return torch.stack([torch.randn(32, generator=torch.Generator().manual_seed(seed)) * 3 for seed in seeds])


def test_statistics_are_those_of_each_step_and_survival_is_carried_on():
    recorder = DraftRecorder()
    recorder.BLOCK = 3  # several blocks, and one that is not full
    recorder.step(["a", "b"], logits(1, 2))
    recorder.step(["a"], logits(3))  # b's gate closed
    recorder.verdict(["a", "b"], [[7, 7], [7]], [2, 1])
    log = DraftLog.from_plain(recorder.plain(), k=4)
    first = all_statistics(logits(1))
    second = all_statistics(logits(3), before=first)
    assert torch.allclose(log.statistics[0, :2], torch.cat([first, second]), atol=1e-5)
    assert torch.allclose(log.statistics[1, 0], all_statistics(logits(2))[0], atol=1e-5)
    assert torch.isnan(log.statistics[0, 2:]).all()
    assert torch.isnan(log.statistics[1, 1:]).all()
    assert (log.drafted.tolist(), log.accepted.tolist(), log.request.tolist()) == ([2, 1], [1, 0], [0, 1])


def test_logits_that_are_sampled_from_in_place_do_not_change_the_record():
    recorder, given = DraftRecorder(), logits(1)
    recorder.step(["a"], given)
    given.zero_()
    recorder.verdict(["a"], [[1]], [1])
    assert recorder.plain()["statistics"][0][0] == all_statistics(logits(1))[0].tolist()


def test_only_what_was_verified_counts():
    recorder = DraftRecorder()
    for name in ("prefill", "cut", "dropped", "waits"):
        for seed in range(3):
            recorder.step([name], logits(seed))
    # In the middle of a prefill nothing is sampled; the scheduler cut one draft short and dropped another.
    recorder.verdict(["prefill", "cut", "dropped"], [[], [5, 6], [5]], [3, 1, 0])
    assert (recorder.plain()["drafted"], recorder.plain()["accepted"]) == ([1], [1])
    # A request that sat out a step is verified later; one whose draft has gone is not.
    recorder.verdict(["waits", "dropped"], [[1, 2, 3], [1, 2]], [3, 1])
    assert (recorder.plain()["drafted"], recorder.plain()["accepted"]) == ([1, 3], [1, 2])


def test_a_pass_without_drafts_judges_nothing():
    recorder = DraftRecorder()
    recorder.step(["a"], logits(1))
    recorder.verdict(["a"], [[1]], None)
    assert recorder.plain()["drafted"] == []
    assert len(DraftLog.from_plain(recorder.plain(), k=2).drafted) == 0


@pytest.fixture
def log():
    """Four rounds of up to three tokens."""
    statistics = torch.rand(4, 3, len(features()))
    columns = torch.tensor([[3, 3, 2, 1], [3, 1, 0, 1], [0, 1, 0, 1]])
    return DraftLog(statistics, *columns, features())


def test_conditional_acceptance(log):
    assert log.conditional_acceptance() == [3 / 4, 1 / 2, 1.0]


def test_a_record_of_nothing_is_an_empty_log():
    log = DraftLog.from_plain(DraftRecorder().plain(), k=3)
    assert log.statistics.shape == (0, 3, len(features()))
    assert log.drafted.dtype == log.accepted.dtype == log.request.dtype == torch.int64
    assert log.conditional_acceptance() == []


def test_a_record_goes_on_after_it_was_read():
    recorder = DraftRecorder()
    recorder.step(["a"], logits(1))
    recorder.plain()
    recorder.step(["a"], logits(2))
    recorder.verdict(["a"], [[1]], [2])
    first = all_statistics(logits(1))
    want = torch.cat([first, all_statistics(logits(2), before=first)])
    assert torch.allclose(torch.tensor(recorder.plain()["statistics"][0]), want, atol=1e-5)
