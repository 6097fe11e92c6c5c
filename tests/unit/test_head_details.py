"""Parts of heads and their fits that larger tests pass over: fingerprints, names, legacy files, blocks, rounds."""

from __future__ import annotations

import math
import os

import pytest
import torch
from exit_heads import lsq_head

from selfspec_cli.early_exit import artifact
from selfspec_cli.early_exit.artifact import load_head, save_head
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.evaluation import RIDGES, tokens_a_round
from selfspec_cli.early_exit.fingerprint import model_fingerprint
from selfspec_cli.early_exit.fitting import FitError, FitReport, NormalEquations, _row_blocks
from selfspec_cli.early_exit.head_metadata import HeadMetadata, find_head, spec_of
from selfspec_cli.early_exit.head_spec import HeadSpec
from selfspec_cli.early_exit.heads.base import HeadError

CONFIG = {"vocab_size": 100, "hidden_size": 80}


def weights():
    return [("embed", torch.randn(100, 80, generator=torch.Generator().manual_seed(0))), ("norm", torch.ones(80))]


@pytest.mark.parametrize("place", [(0, 0), (99, 0), (0, 79), (99, 79)])
def test_a_fingerprint_reaches_every_corner(place):
    changed = weights()
    changed[0][1][place] += 1
    assert model_fingerprint(CONFIG, changed) != model_fingerprint(CONFIG, weights())


def test_a_fingerprint_takes_tensors_by_name_and_fields_from_either_config():
    names = ["b", "a"]
    one, other = (list(zip(names, (weight for _, weight in weights()), strict=True))[::step] for step in (1, -1))
    assert model_fingerprint(CONFIG, one) == model_fingerprint(CONFIG, other)
    assert model_fingerprint(CONFIG, weights()) != model_fingerprint(CONFIG, one)  # another order of the same tensors
    same = [("x", torch.ones(80)), ("x", torch.ones(80))]
    assert model_fingerprint(CONFIG, same)  # equal names do not compare tensors
    nested = {"text_config": {"vocab_size": 100}, "hidden_size": 80}
    assert model_fingerprint(nested, weights()) == model_fingerprint(CONFIG, weights())


def test_the_first_target_is_a_kinds_own():
    assert HeadSpec("lsq").target == "next_token"
    assert HeadSpec.from_name("lsq") == HeadSpec("lsq", "next_token")
    assert HeadSpec("lens").target is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HeadSpec("lsq", "argmin"), "target of a lsq head 'argmin'"),
        (lambda: HeadSpec("lens", "argmax"), "allowed: none"),
        (lambda: HeadSpec("lens", kl=True), "a head of kind lens has no KL training; kinds that can: "),
        (lambda: HeadSpec.from_name("lsq_argmix"), "head 'lsq_argmix' is not known"),
    ],
)
def test_what_a_head_cannot_be_is_said(make, message):
    with pytest.raises(SettingsError) as error:
        make()
    assert message in str(error.value)


def test_a_temporary_file_lies_beside_the_head(tmp_path, monkeypatch):
    seen = []

    def full(tensors, path, metadata):
        seen.append(os.path.dirname(path))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_head(tmp_path / "new" / "h.safetensors", lsq_head(torch.zeros(9, 4)), HeadMetadata("lsq", 3, 4, 9))
    assert seen == [str(tmp_path / "new")]
    with pytest.raises(HeadError, match=r"saved as \.safetensors, not 'h\.pt'"):
        save_head(tmp_path / "h.pt", lsq_head(torch.zeros(9, 4)), HeadMetadata("lsq", 3, 4, 9))


def test_a_legacy_head_may_have_a_bias(tmp_path):
    file = tmp_path / "ee_layer3_lsq.pt"
    torch.save({"weight": torch.zeros(9, 4), "bias": torch.ones(9)}, file)
    loaded = load_head(file)
    assert loaded.metadata.bias
    assert loaded.head.tensors["bias"].tolist() == [1.0] * 9
    assert spec_of(file) == HeadSpec("lsq")
    torch.save({"weight": torch.zeros(9, 4), "scale": torch.ones(9)}, file)
    with pytest.raises(HeadError, match="and a bias"):
        load_head(file)


def test_a_folder_without_heads_says_so_and_passes_hidden_files_over(tmp_path):
    (tmp_path / ".layer3_lsq.safetensors").write_bytes(b"half written")
    with pytest.raises(HeadError, match=r"it has no head$"):
        find_head(tmp_path, 3)


@pytest.mark.parametrize(
    ("agreed", "k", "tokens"),
    [
        ([True] * 8, 3, 4.0),  # two rounds of three drafts and the token after them
        ([True] * 8, 1, 2.0),
        ([False] * 5, 3, 1.0),
        ([True, False, True, True, False], 4, 2.5),  # 2 and 3
        ([True], 4, 1.0),  # nothing is left to accept a draft for
    ],
)
def test_rounds_are_laid_over_what_agreed(agreed, k, tokens):
    assert tokens_a_round([agreed], k) == pytest.approx(tokens)
    assert tokens_a_round([agreed, agreed], k) == pytest.approx(tokens)


def test_without_positions_there_are_no_rounds():
    with pytest.raises(ValueError, match="no generated positions"):
        tokens_a_round([[]], 3)


def test_blocks_of_rows_are_all_rows_once():
    for rows, width in ((1, 1), (10, 2**24), (7, 2**27), (5, 2**25)):
        covered = [row for block in _row_blocks(rows, width) for row in range(rows)[block]]
        assert covered == list(range(rows))
        assert all((block.stop - block.start) * width <= max(2**26, width) for block in _row_blocks(rows, width))


def test_targets_without_variance_have_nothing_to_explain():
    def report(residual, baseline):
        return FitReport(9, 4, 2, 0.0, None, 1.0, residual, baseline, torch.zeros(2))

    assert math.isnan(report(0.0, 0.0).explained)
    assert report(1.0, 4.0).explained == 0.75


def test_a_low_rank_fit_reports_the_condition_of_the_whole():
    states = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    equations = NormalEquations(6, 5)
    equations.update(states, states @ torch.randn(6, 5, generator=torch.Generator().manual_seed(2)))
    assert equations.solve_low_rank(2)[-1].condition == equations.solve(0.0)[-1].condition > 1


def test_what_is_not_finite_is_called_state_or_target():
    states, targets = torch.randn(4, 6), torch.randn(4, 5)
    targets[2, 1] = torch.nan
    with pytest.raises(FitError, match=r"^target of token 2 "):
        NormalEquations(6, 5).update(states, targets)


def test_ridges_rise():
    assert list(RIDGES) == sorted(RIDGES)
    assert (min(RIDGES), max(RIDGES)) == (1e-6, 100.0)
