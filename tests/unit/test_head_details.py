"""Parts of heads and their fits that larger tests pass over: fingerprints, names, files, messages, blocks, rounds."""

import math

import pytest
import torch
from exit_heads import lens_head, lsq_head, translator_head

from selfspec_cli.early_exit.artifact import load_head, model_fingerprint, save_head
from selfspec_cli.early_exit.equations import FitError, FitReport, NormalEquations, _row_blocks
from selfspec_cli.early_exit.errors import HeadError, SettingsError
from selfspec_cli.early_exit.head_metadata import HeadMetadata, find_head, read_metadata
from selfspec_cli.early_exit.head_spec import HeadSpec
from selfspec_cli.early_exit.heads import HEADS
from selfspec_cli.early_exit.heads.base import HeadKind

CONFIG = {"vocab_size": 100, "hidden_size": 80}


def weights():
    return [("embed", torch.randn(100, 80, generator=torch.Generator().manual_seed(0))), ("norm", torch.ones(80))]


@pytest.mark.parametrize("place", [(0, 0), (99, 0), (0, 79), (99, 79)])
def test_a_fingerprint_reaches_every_corner(place):
    changed = weights()
    changed[0][1][place] += 1
    assert model_fingerprint(CONFIG, changed) != model_fingerprint(CONFIG, weights())


def test_a_fingerprint_stays_what_it_was():
    """Heads on disk hold it. Of both axes 64 places are taken, and bfloat16 holds every one of these numbers."""
    embed = torch.arange(100).unsqueeze(1) % 11 + torch.arange(80) % 7 / 8
    assert model_fingerprint(CONFIG, [("embed", embed), ("norm", torch.ones(80))]) == "875fbd485d979c3d"


def test_a_fingerprint_is_taken_where_the_tensors_are():
    """vLLM builds models under another default device than a host's tensors are on."""
    here, given = model_fingerprint(CONFIG, weights()), weights()
    with torch.device("meta"):
        assert model_fingerprint(CONFIG, given) == here


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HeadSpec("lsq", "argmin"), "target of a lsq head 'argmin'"),
        (lambda: HeadSpec("lens", "argmax"), "allowed: none"),
        (lambda: HeadSpec("lens", bias=True), "a head of kind lens has no bias; kinds that can: lsq, translator"),
        (lambda: HeadSpec.from_name("lsq_argmix"), "head 'lsq_argmix' is not known"),
    ],
)
def test_what_a_head_cannot_be_is_said(make, message):
    with pytest.raises(SettingsError) as error:
        make()
    assert message in str(error.value)


def test_of_two_kinds_that_a_name_begins_with_the_longer_is_meant(monkeypatch):
    class Other(HeadKind):
        name, help = "lens_bias", "its name is also that of a lens with a bias, which there is not"

    monkeypatch.setitem(HEADS._found, "lens_bias", Other())
    assert HeadSpec.from_name("lens_bias") == HeadSpec("lens_bias")


def test_why_another_packages_head_cannot_be_used_is_said(monkeypatch):
    monkeypatch.setitem(HEADS.broken, "mine", "head 'mine' of a package cannot be used: it has no name")
    with pytest.raises(SettingsError, match=r"^head 'mine' of a package cannot be used: it has no name$"):
        HeadSpec.from_name("mine")


def test_rows_that_somebody_else_keeps_are_given_up():
    head = lsq_head(torch.zeros(3, 4), torch.zeros(3), torch.tensor([1, 4, 5]))
    head.drop_rows()
    assert not head.tensors
    assert not list(head.parameters())
    assert head.transform(torch.ones(1, 4)).tolist() == [[1.0] * 4]
    assert head.to_full_ids(torch.tensor([2])).tolist() == [5]


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_may_hold_no_tensors_and_long_metadata(tmp_path):
    metadata = HeadMetadata("lens", 3, 4, 9, corpus="a name of 5000 characters".ljust(5000))
    file = save_head(tmp_path / "lens.safetensors", lens_head(), metadata)
    assert read_metadata(file) == load_head(file).metadata == metadata


@pytest.mark.parametrize(
    ("head", "kind", "message"),
    [
        (lens_head(), "lsq", "a lsq head has the tensors weight or weight, bias; here there are none"),
        (lsq_head(torch.zeros(9, 4)), "lens", "a lens head has the tensors none; here there are weight"),
        (
            translator_head(down=torch.zeros(2, 4), up=torch.zeros(4, 2)),
            "translator",
            "its rank is 2, and the metadata have none",
        ),
    ],
)
def test_a_file_whose_tensors_are_not_those_of_its_metadata_is_named(head, kind, message, tmp_path):
    file = tmp_path / "h.safetensors"
    with pytest.raises(HeadError) as error:
        save_head(file, head, HeadMetadata(kind, 3, 4, 9))
    assert str(error.value) == f"head {file}: {message}"


def test_a_head_is_saved_as_safetensors(tmp_path):
    with pytest.raises(HeadError, match=r"saved as \.safetensors, not 'h\.pt'"):
        save_head(tmp_path / "h.pt", lsq_head(torch.zeros(9, 4)), HeadMetadata("lsq", 3, 4, 9))


def test_a_legacy_head_that_was_saved_on_a_gpu_is_read_to_the_host(tmp_path, monkeypatch):
    file = tmp_path / "h3.pt"
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")  # as PyTorch calls the first GPU
        torch.save(torch.ones(9, 4), file)
    assert load_head(file).head.weight.device == torch.device("cpu")


def test_a_folder_without_heads_says_so_and_passes_hidden_files_over(tmp_path):
    (tmp_path / ".layer3_lsq.safetensors").write_bytes(b"half written")
    with pytest.raises(HeadError, match=r"it has no head$"):
        find_head(tmp_path, 3)


# ---- fits ------------------------------------------------------------------------------------------------------------


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


def test_a_ridge_that_is_lost_in_rounding_does_not_help_a_singular_matrix():
    equations = NormalEquations(2, 3)
    equations.update(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(FitError, match=r"are singular at ridge 1e-300 \(condition .*\); give a larger ridge$"):
        equations.solve(1e-300)
