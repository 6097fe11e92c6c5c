"""A table of lengths that is set on a live worker: what is taken, and what is refused."""

from types import SimpleNamespace

import pytest

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.vllm_plugin.v1.lengths import DraftLengths
from selfspec_cli.vllm_plugin.worker import EarlyExitWorker


def worker(**drafter):
    made = EarlyExitWorker()
    made.model_runner = SimpleNamespace(drafter=SimpleNamespace(**drafter))
    return made


def settings():
    return ResolvedSettings.from_user({"num_speculative_tokens": 4, "layer_skip": 2, "gate": "maxp"}, 8)


def test_a_table_is_checked_and_handed_to_the_drafter():
    lengths = DraftLengths(settings(), 8)
    live = worker(settings=settings(), set_table=lambda table: setattr(lengths, "table", table))
    live.early_exit_set_length_table("3:2 9:0")
    assert [lengths.table.at(count).k for count in (1, 3, 9)] == [4, 2, 0]
    live.early_exit_set_length_table(None)
    assert lengths.table.at(100).k == 4


@pytest.mark.parametrize(
    ("text", "said"), [("3:5", "more than the engine's k"), ("x", "is no entry"), ("3:2/0.7", "is no entry")]
)
def test_what_is_no_table_of_this_engine_is_refused(text, said):
    live = worker(settings=settings(), set_table=lambda table: pytest.fail("it was set"))
    with pytest.raises(SettingsError, match=said):
        live.early_exit_set_length_table(text)


def test_an_engine_that_does_not_draft_with_its_own_layers_has_none():
    with pytest.raises(SettingsError, match="has no table of draft lengths"):
        worker().early_exit_set_length_table("1:2")
