"""Copies of weights and draft vocabularies, for any weights, integers, counts and lists of ids."""

import json
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from properties import settings as _profile  # noqa: F401 (loads the profile)

from selfspec_cli.early_exit.draft_vocab import count_tokens, load_counts, read_ids, save_counts, spread_ids, tag_of
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS, fp8
from selfspec_cli.early_exit.draft_weights import integers as integer_weights
from selfspec_cli.early_exit.draft_weights.integers import GROUP
from selfspec_cli.early_exit.errors import HeadError
from selfspec_cli.early_exit.head_module import most_frequent_ids

WIDTHS = (4, 8)
in_a_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def weights(draw):
    """[rows, 2 * GROUP]: any scale a row, zeros and outliers among the values."""
    rows = draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    made = torch.randn(rows, 2 * GROUP, generator=generator)
    made *= torch.tensor(draw(st.lists(st.floats(1e-3, 1e3), min_size=rows, max_size=rows))).unsqueeze(1)
    made[:, draw(st.integers(0, 2 * GROUP - 1))] *= draw(st.sampled_from([0.0, 1.0, 30.0]))
    if draw(st.booleans()):
        made[draw(st.integers(0, rows - 1)), :GROUP] = 0.0
    return made


@given(st.sampled_from(WIDTHS), weights())
def test_an_integer_copy_is_off_by_half_a_step_but_for_what_a_closer_range_cuts_off(width, weight):
    kind, top = DRAFT_WEIGHTS[f"int{width}"], 2 ** (width - 1)
    copy = kind.quantise(weight)
    groups, scale = weight.unflatten(1, (-1, GROUP)), copy["scales"].float().unsqueeze(2)
    apart = (kind.dequantise(copy, torch.float32).unflatten(1, (-1, GROUP)) - groups).abs()
    beyond = (groups / scale > top - 1) | (groups / scale < -top)
    assert ((apart <= scale.abs() / 2 * (1 + 1e-4)) | beyond).all()


@given(st.sampled_from(["fp8", *(f"int{width}" for width in WIDTHS)]), weights())
@in_a_folder
def test_how_many_rows_are_copied_at_once_changes_nothing(name, weight):
    kind = DRAFT_WEIGHTS[name]
    whole = kind.quantise(weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integer_weights, "CHUNK", weight.shape[1])
        patch.setattr(fp8, "CHUNK", 1)
        for tensor, other in zip(kind.quantise(weight).values(), whole.values(), strict=True):
            assert tensor.view(torch.uint8).equal(other.view(torch.uint8))


# ---- draft vocabularies ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
def test_the_most_frequent_tokens(counts, data):
    size = data.draw(st.integers(1, len(counts)))
    ids = most_frequent_ids(torch.tensor(counts), size).tolist()
    assert ids == sorted(sorted(range(len(counts)), key=lambda token: (-counts[token], token))[:size])


def test_ids_at_even_spacing():
    assert spread_ids(4, 11).tolist() == [0, 2, 5, 8]


@given(st.lists(st.lists(st.integers(0, 12), max_size=20), max_size=5))
def test_tokens_are_counted_but_for_those_outside(windows):
    found = count_tokens(windows, 9)
    counted = Counter(token for window in windows for token in window)
    assert found.tolist() == [counted[token] for token in range(9)]


@given(st.lists(st.integers(-3, 10**20), max_size=12), st.integers(1, 2**40), st.booleans())
@in_a_folder
def test_a_list_of_ids_is_read_or_refused_in_words(tmp_path_factory, ids, vocab, as_json):
    path = tmp_path_factory.getbasetemp() / "ids"
    path.write_text(json.dumps(ids) if as_json else "\n".join(map(str, ids)))
    if ids and all(0 <= number < vocab for number in ids):
        found = read_ids(path, vocab)
        assert found.dtype == torch.int64
        assert found.tolist() == sorted(set(ids))
    else:
        with pytest.raises(HeadError, match=r"ids|draft vocabulary"):
            read_ids(path, vocab)


def test_an_id_that_is_no_64_bit_number_is_out_of_range(tmp_path):
    (tmp_path / "ids").write_text(f"[1, {2**63}]")
    with pytest.raises(HeadError, match=r"ids: a token id is out of range; allowed: 0 to 99"):
        read_ids(tmp_path / "ids", 100)


def test_the_whole_vocabulary_has_no_tag():
    assert tag_of("full", torch.arange(3)) is None


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=20), st.text(max_size=10))
@in_a_folder
def test_counts_come_back_for_their_vocabulary_and_their_text_alone(tmp_path_factory, counts, corpus):
    folder = tmp_path_factory.getbasetemp() / "counts"
    save_counts(folder, torch.tensor(counts), corpus)
    assert load_counts(folder, len(counts)).tolist() == counts
    assert load_counts(folder, len(counts), corpus).tolist() == counts
    assert load_counts(folder, len(counts), corpus + "!") is None
    assert load_counts(folder, len(counts) + 1) is None
    assert [file.name for file in folder.iterdir()] == ["token_counts.safetensors"]
