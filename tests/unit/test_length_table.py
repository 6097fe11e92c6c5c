"""Limits of the draft length: the table by load, which of its entries is in force, and what one request asks for."""

import pytest
from refusals import said

from selfspec_cli.early_exit.counters import REASONS
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.length_table import Cell, LengthTable
from selfspec_cli.early_exit.resolved import NOTHING, RequestSettings, ResolvedSettings, switched_off_by


def test_the_last_entry_that_is_reached_is_in_force():
    table = LengthTable.parse("33:3 129:0 129@8192:2", 5)
    wanted = {(1, 0): 5, (32, 10**6): 5, (33, 0): 3, (128, 9000): 3, (129, 8191): 0, (129, 8192): 2, (4000, 10**6): 2}
    assert {place: table.at(*place).k for place in wanted} == wanted
    assert table.lengths == (5, 3, 2, 0)
    assert table.by_context
    assert table.row(32) == (Cell(1, 0, 5),)
    assert table.row(128) == (Cell(33, 0, 3),)
    assert table.row(4000) == (Cell(129, 0, 0), Cell(129, 8192, 2))


def test_the_order_of_writing_does_not_matter_and_its_own_spelling_reads_back_equal():
    table = LengthTable.parse(" 129@8192:2 129:0\n33:3", 5)
    assert str(table) == "1:5 33:3 129:0 129@8192:2"
    assert LengthTable.parse(str(table), 5) == table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no entry"),
        ("33 64:0", "'33 64:0': '33' is no entry; it is written REQUESTS"),
        ("0:3", "allowed: 1 to"),
        ("33:6", "drafts more than the engine's k; allowed: 0 to 5"),
        ("33:3 33:2", "length_table = '33:3 33:2': two entries are for the same load, 33:3 and 33:2"),
        ("33@100:3", "add one for the others, such as 33:5"),
        (f"{2**31}:3", f"is out of range; allowed: 1 to {2**31 - 1} requests"),
        (f"1@{2**31}:1", f"allowed: 1 to {2**31 - 1} requests"),
        (7, "must be text, not int"),
    ],
)
def test_what_is_no_table_is_refused(text, message):
    assert message in said(SettingsError, LengthTable.parse, text, 5)


def test_vllms_own_lookup_agrees():
    utils = pytest.importorskip("vllm.v1.spec_decode.dynamic.utils")
    ranges = [[1, 4, 5], [9, 16, 2], [20, 20, 0]]
    theirs = utils.build_dynamic_sd_schedule_lookup(ranges, vllm_max_batch_size=40, vllm_num_speculative_tokens=4)
    ours = LengthTable.from_vllm(ranges[::-1], 4)
    assert theirs[1:] == [ours.at(requests, 0).k for requests in range(1, 41)]


@pytest.mark.parametrize(
    "ranges",
    [[], "x", [[1, 2]], [[2, 3, 1]], [[1, 3, 1], [3, 4, 1]], [[3, 1, 1]], [[1, 2, -1]], [[1, 2, True]], [[1.5, 2, 3]]],
)
def test_what_is_no_list_of_vllms_is_refused(ranges):
    with pytest.raises(SettingsError, match="num_speculative_tokens_per_batch_size"):
        LengthTable.from_vllm(ranges, 5)


def test_numbers_are_32_bits_wide():
    largest = 2**31 - 1
    assert LengthTable.parse(f"{largest}@{largest}:1 {largest}:2", 5).at(largest, largest).k == 1


# ---- what one request may ask for -----------------------------------------------------------------------------------


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
    assert message in said(SettingsError, RequestSettings.of, asked, settings())
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
