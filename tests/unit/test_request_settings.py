"""What a request may ask of drafting, and the message where it asks for something else."""

import pytest

from selfspec_cli.early_exit.counters import REASONS
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.length_table import Cell
from selfspec_cli.early_exit.request_settings import NOTHING, RequestSettings, switched_off_by
from selfspec_cli.early_exit.resolved import ResolvedSettings


def settings(**spec):
    return ResolvedSettings.from_user({"method": "layer_skip", "num_speculative_tokens": 5, **spec}, 24)


def test_a_length_and_a_threshold():
    asked = {"selfspec_k": 2, "selfspec_threshold": 0.7, "session_id": "somebody else's"}
    assert RequestSettings.of(asked, settings(gate="maxp")) == RequestSettings(2, 0.7)
    assert RequestSettings.of({"selfspec_k": 0}, settings()) == RequestSettings(0)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"selfspec_k": 6}, "selfspec_k = 6 is out of range; allowed: whole numbers from 0 (no drafts)"),
        ({"selfspec_k": True}, "selfspec_k = True"),
        ({"selfspec_K": 2}, "did you mean 'selfspec_k'?"),
        ({"selfspec_gate": "maxp"}, "request setting 'selfspec_gate' is not known; allowed: selfspec_k"),
        ({"selfspec_threshold": 0.4}, "gate 'none' has no threshold"),
    ],
)
def test_what_cannot_be_had_is_refused(asked, message):
    with pytest.raises(SettingsError) as error:
        RequestSettings.of(asked, settings())
    assert message in str(error.value)
    with pytest.raises(SettingsError, match="selfspec_threshold"):
        RequestSettings.of({"selfspec_threshold": float("nan")}, settings(gate="maxp"))


@pytest.mark.parametrize(
    ("cell", "own", "reason"),
    [
        (Cell(1, 0, 4), NOTHING, None),
        (Cell(1, 0, 4), RequestSettings(1), None),
        (Cell(1, 0, 4), RequestSettings(0), "request"),
        (Cell(8, 0, 0), NOTHING, "load"),
        (Cell(8, 0, 0), RequestSettings(0), "load"),
        (Cell(8, 100, 0), RequestSettings(3), "context"),
    ],
)
def test_what_keeps_a_request_from_being_drafted_for(cell, own, reason):
    assert switched_off_by(cell, own) == reason
    assert reason is None or reason in REASONS
