"""Copies of weights and draft vocabularies, for any weights, integers, counts and lists of ids."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from properties import settings as _profile  # noqa: F401 (loads the profile)

from selfspec_cli.early_exit.draft_vocab import count_tokens, load_counts, read_ids, save_counts, spread_ids, tag_of
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS, fp8
from selfspec_cli.early_exit.draft_weights import integers as integer_weights
from selfspec_cli.early_exit.draft_weights.integers import GROUP, PARTS, _packed, integers
from selfspec_cli.early_exit.errors import HeadError
from selfspec_cli.early_exit.head_module import most_frequent_ids

WIDTHS = (4, 8)
in_a_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def weights(draw, groups=2, greatest=1e3):
    """[rows, groups * GROUP]: any scale a row, zeros and outliers among the values."""
    rows = draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    made = torch.randn(rows, groups * GROUP, generator=generator)
    made *= torch.tensor(draw(st.lists(st.floats(1e-3, greatest), min_size=rows, max_size=rows))).unsqueeze(1)
    made[:, draw(st.integers(0, groups * GROUP - 1))] *= draw(st.sampled_from([0.0, 1.0, 30.0]))
    if draw(st.booleans()):
        made[draw(st.integers(0, rows - 1)), :GROUP] = 0.0
    return made


@given(st.sampled_from(WIDTHS), st.data())
def test_integers_come_back_from_their_words(width, data):
    top = 2 ** (width - 1)
    shape = (data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), GROUP)
    q = torch.from_numpy(data.draw(arrays(np.int32, shape, elements=st.integers(-top, top - 1))))
    packed = _packed(q, width)
    assert integers(packed, width).equal(q)
    words = {"words": shape[0] * shape[1] * GROUP // PARTS * (2 if width == 8 else 1)}
    assert {name: tensor.numel() for name, tensor in packed.items()} == words


@given(st.sampled_from(WIDTHS), weights())
def test_an_integer_copy_is_off_by_half_a_step_but_for_what_a_closer_range_cuts_off(width, weight):
    kind, top = DRAFT_WEIGHTS[f"int{width}"], 2 ** (width - 1)
    copy = kind.quantise(weight)
    groups, scale = weight.unflatten(1, (-1, GROUP)), copy["scales"].float().unsqueeze(2)
    apart = (kind.dequantise(copy, torch.float32).unflatten(1, (-1, GROUP)) - groups).abs()
    beyond = (groups / scale > top - 1) | (groups / scale < -top)
    assert ((apart <= scale.abs() / 2 * (1 + 1e-4)) | beyond).all()


@given(st.sampled_from(["fp8", *(f"int{width}" for width in WIDTHS)]), weights(), st.integers(-3, 3))
def test_a_copy_of_some_rows_or_of_a_scaled_weight_is_that_of_the_whole(name, weight, power):
    kind = DRAFT_WEIGHTS[name]
    whole = kind.dequantise(kind.quantise(weight), torch.float32)
    rows = [kind.dequantise(kind.quantise(row.unsqueeze(0)), torch.float32) for row in weight]
    assert torch.cat(rows).equal(whole)
    scaled = kind.dequantise(kind.quantise(weight * 2.0**power), torch.float32)
    torch.testing.assert_close(scaled, whole * 2.0**power, rtol=2e-2, atol=1e-5)  # scales are halves, some subnormal


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


@given(weights(greatest=1e6))
def test_an_8_bit_float_is_off_by_a_sixteenth_at_most(weight):
    kind = DRAFT_WEIGHTS["fp8"]
    copy = kind.quantise(weight)
    restored = kind.dequantise(copy, torch.float32)
    bound = torch.maximum(weight.abs() / 16, copy["scale"] * 2.0**-10)
    assert ((restored - weight).abs() <= bound * (1 + 1e-5)).all()
    assert (restored[weight == 0] == 0).all()


# ---- draft vocabularies ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
def test_the_most_frequent_tokens(counts, data):
    size = data.draw(st.integers(1, len(counts)))
    ids = most_frequent_ids(torch.tensor(counts), size).tolist()
    assert ids == sorted(sorted(range(len(counts)), key=lambda token: (-counts[token], token))[:size])


@given(st.integers(1, 500), st.data())
def test_ids_at_even_spacing(vocab, data):
    size = data.draw(st.integers(1, vocab))
    ids = spread_ids(size, vocab).tolist()
    assert ids[0] == 0 and ids[-1] < vocab and len(ids) == size
    gaps = {right - left for left, right in pairwise(ids)}
    assert gaps <= {vocab // size, -(-vocab // size)}
    assert size < 2 or min(gaps) >= 1


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


@given(st.sets(st.integers(0, 99), min_size=1), st.sets(st.integers(0, 99), min_size=1))
def test_two_lists_have_two_tags_and_one_list_has_one(one, other):
    one, other = torch.tensor(sorted(one)), torch.tensor(sorted(other))
    assert (tag_of("a.txt", one) == tag_of("b.txt", other)) == one.equal(other)
    assert tag_of("a.txt", one).startswith(f"v{len(one)}-")
    assert tag_of(str(len(one)), one) == f"v{len(one)}"
    assert tag_of("full", one) is None


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
