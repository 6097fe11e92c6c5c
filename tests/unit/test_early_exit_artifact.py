"""Head files: what is saved comes back, and what should not be loaded is not."""

import dataclasses
import pathlib

import pytest
import torch
from exit_heads import lens_head, lsq_head, translator_head
from refusals import said
from safetensors import safe_open
from safetensors.torch import save_file

from selfspec_cli.early_exit import artifact
from selfspec_cli.early_exit.artifact import load_head, model_fingerprint, save_head, save_pt
from selfspec_cli.early_exit.errors import HeadError, SettingsError
from selfspec_cli.early_exit.head_metadata import HeadMetadata, find_head, head_filename, read_metadata
from selfspec_cli.early_exit.head_module import with_draft_vocabulary
from selfspec_cli.early_exit.heads import HEADS as KINDS
from selfspec_cli.early_exit.heads import HeadSpec, examples
from selfspec_cli.early_exit.heads.base import HeadKind

HIDDEN, VOCAB = 4, 9
LSQ = HeadSpec("lsq")
IDS = torch.tensor([0, 2, 8])
W, SQUARE = torch.randn(VOCAB, HIDDEN), torch.randn(HIDDEN, HIDDEN)
FITTED = {"corpus": "stdlib", "pairs": 100, "ridge": 1e-3, "fit": {"residual": 0.25}, "versions": {"torch": "2"}}
META = HeadMetadata("lsq", 3, HIDDEN, VOCAB, fingerprint="abc", target="next_token", **FITTED)
LENS = dataclasses.replace(META, kind="lens", target=None)
TRANSLATOR = dataclasses.replace(META, kind="translator", target="final_hidden")
HEADS = {
    "lens": (lens_head(), dataclasses.replace(LENS, corpus="a long name".ljust(5000))),
    "lens small": (lens_head(IDS), LENS),
    "lsq": (lsq_head(W), META),
    "lsq bias": (lsq_head(W, torch.randn(VOCAB)), META),
    "lsq small": (with_draft_vocabulary(lsq_head(W, torch.randn(VOCAB)), IDS), META),
    "translator": (translator_head(SQUARE), TRANSLATOR),
    "low rank": (
        translator_head(down=SQUARE[:2], up=SQUARE[:, :2], bias=SQUARE[0], vocab_ids=IDS),
        dataclasses.replace(TRANSLATOR, rank=2),
    ),
}


@pytest.fixture
def saved(tmp_path):
    return save_head(tmp_path / "layer3_lsq.safetensors", lsq_head(W), META)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_round_trip(name, dtype, tmp_path):
    head, metadata = HEADS[name]
    head = type(head).to(head, dtype)
    path = save_head(tmp_path / "new" / "head.safetensors", head, metadata)
    loaded = load_head(path, layer=3, hidden=HIDDEN, vocab_size=VOCAB, fingerprint="abc")
    assert loaded.metadata == metadata == read_metadata(path)
    assert loaded.metadata.spec == HeadSpec(metadata.kind, metadata.target, metadata.rank, metadata.bias)
    assert type(loaded.head) is type(head)
    before, after = head.state_dict(), loaded.head.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    head.to(torch.float32)


@pytest.mark.parametrize(
    ("want", "words"),
    [
        ({"fingerprint": "xyz"}, "another model: its fingerprint is abc, this model's is xyz"),
        ({"layer": 4}, "for layer 3; layer 4"),
        ({"hidden": 8}, "another model: its hidden is 4"),
        ({"vocab_size": 10}, "another model: its vocab_size is 9"),
    ],
)
def test_a_head_for_another_model_is_refused(saved, want, words):
    assert words in said(HeadError, load_head, saved, **want)


def test_a_file_whose_tensors_were_exchanged_is_named(saved):
    with safe_open(saved, framework="pt") as file:
        metadata = file.metadata()
    save_file({"weight": W[:2]}, saved, metadata=metadata)
    assert str(saved) in said(HeadError, load_head, saved)


def test_foreign_and_missing_files(tmp_path):
    path = tmp_path / "x.safetensors"
    assert "does not exist" in said(HeadError, load_head, path)
    path.write_bytes(b"\xff" * 64)
    assert "truncated or no safetensors" in said(HeadError, load_head, path)
    save_file({"weight": W}, path, metadata={"format": "pt"})
    assert "no exit head; its format is 'pt'" in said(HeadError, load_head, path)
    save_file({"weight": W}, path, metadata={"format": artifact.FORMAT, "format_version": "99"})
    assert "version 99" in said(HeadError, load_head, path)
    save_file({"weight": W}, path, metadata={"format": artifact.FORMAT, "format_version": "1", "kind": "lsq"})
    assert "damaged metadata" in said(HeadError, load_head, path)
    (tmp_path / "x.bin").write_bytes(b"")
    assert "suffix" in said(HeadError, load_head, tmp_path / "x.bin")


@pytest.mark.parametrize("bias", [None, torch.arange(VOCAB).float()])
def test_a_head_goes_to_a_pt_file_and_back(bias, tmp_path, caplog):
    meta = dataclasses.replace(META, kind="lsq", target="next_token", layer=12, fit={"scale": 21.5})
    file = save_pt(tmp_path / "ee_head", lsq_head(W, bias), meta)
    assert [found.name for found in file.parent.iterdir()] == ["ee_layer12_lsq.pt"]
    held = torch.load(file, weights_only=True)
    assert set(held) == {"weight", "after_norm", "scale"} | (set() if bias is None else {"bias"})
    assert all(isinstance(tensor, torch.Tensor) for tensor in held.values())
    assert "layer 12" in said(HeadError, load_head, file, layer=6)
    head, metadata = load_head(file, layer=12, hidden=HIDDEN, vocab_size=VOCAB, fingerprint="unknown to it")
    assert torch.equal(head.weight, W)
    assert bias is None or torch.equal(head.tensors["bias"], bias)
    assert metadata == HeadMetadata("lsq", 12, HIDDEN, VOCAB, bias=bias is not None, fit={"scale": 21.5})
    assert not caplog.records, "the file says that it was fitted after the norm"


def test_heads_that_a_file_cannot_hold_are_not_saved(tmp_path):
    lsq, lens, (low, of_low) = lsq_head(torch.zeros(9, 4)), lens_head(torch.tensor([9])), HEADS["low rank"]
    file = tmp_path / "h.safetensors"
    assert "rank" in said(HeadError, save_head, file, low, dataclasses.replace(of_low, rank=3))
    assert "saved as .safetensors, not 'h.pt'" in said(HeadError, save_head, tmp_path / "h.pt", lsq, META)
    assert "id 9 is out of range" in said(HeadError, save_head, file, lens, HEADS["lens"][1])
    assert "lsq over all tokens, not lens" in said(HeadError, save_pt, tmp_path, *HEADS["lens"])
    assert "over all tokens" in said(HeadError, save_pt, tmp_path, lsq_head(W[IDS], None, IDS), META)
    assert not list(tmp_path.iterdir())


def test_a_pt_file_says_where_it_was_fitted_or_is_asked(tmp_path, caplog):
    file = tmp_path / "h7.pt"
    torch.save({"weight": W}, file)
    for _ in range(2):
        load_head(file)
    (record,) = caplog.records  # once
    assert record.name == "vllm.selfspec"
    assert "before or after the model's final norm" in record.getMessage()
    assert str(file) in record.getMessage()
    torch.save({"weight": W, "after_norm": torch.tensor(False)}, file)
    assert "before the model's final norm" in said(HeadError, load_head, file)


class Marker:
    """Would leave a file behind if it were ever unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (pathlib.Path.touch, (self.path,))


def test_pickled_objects_are_refused_unopened(tmp_path):
    ran = tmp_path / "ran"
    torch.save({"weight": Marker(ran)}, tmp_path / "h7.pt")
    assert "other than tensors" in said(HeadError, load_head, tmp_path / "h7.pt")
    assert not ran.exists()


@pytest.mark.parametrize(
    "data",
    [
        {"weight": [1.0]},
        [W],
        "text",
        {"weight": W.long()},
        {"weight": W, "bias": W},
        {"weight": W, "after_norm": True},
        {"weight": W, "scale": W},
    ],
    ids=range(7),
)
def test_legacy_files_hold_tensors_only(data, tmp_path):
    torch.save(data, tmp_path / "h7.pt")
    assert f"head {tmp_path}" in said(HeadError, load_head, tmp_path / "h7.pt")


def test_damaged_or_nameless_legacy_files(tmp_path):
    torch.save({"weight": W}, tmp_path / "h7.pt")
    whole = (tmp_path / "h7.pt").read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 30):
        (tmp_path / "h7.pt").write_bytes(whole[:length])
        assert "corrupt" in said(HeadError, load_head, tmp_path / "h7.pt")
    torch.save({"weight": W}, tmp_path / "head.pt")
    assert "read from the name" in said(HeadError, load_head, tmp_path / "head.pt")


def test_a_directory_of_heads(tmp_path):
    for layer in (2, 4):
        save_head(tmp_path / head_filename(LSQ, layer), lsq_head(W), dataclasses.replace(META, layer=layer))
    lens = dataclasses.replace(LENS, layer=4, draft_vocab="v3")
    save_head(tmp_path / head_filename(HeadSpec(), 4, "v3"), lens_head(IDS), lens)
    torch.save(W, tmp_path / "h6.pt")
    (tmp_path / "note.txt").write_text("")
    assert find_head(tmp_path, 2).name == "layer2_lsq.safetensors"
    assert find_head(tmp_path, 4, LSQ).name == "layer4_lsq.safetensors"
    assert find_head(tmp_path, 6).name == "h6.pt"
    assert load_head(tmp_path, layer=2).metadata.layer == 2
    assert "2 heads for layer 4" in said(HeadError, find_head, tmp_path, 4)
    with pytest.raises(HeadError, match=r"no head for layer 5; it has .*lsq at layer 2"):
        find_head(tmp_path, 5)
    assert "or a layer" in said(HeadError, load_head, tmp_path)
    assert "does not exist" in said(HeadError, find_head, tmp_path / "no", 4)
    (tmp_path / "bad.safetensors").write_bytes(b"x")
    assert "truncated" in said(HeadError, find_head, tmp_path, 5)


def test_every_head_has_a_name_of_its_own():
    """Kind, target, rank, bias and vocabulary are all in the name of the file, and found again by it."""
    specs = [HeadSpec.from_name(name) for name in (*examples(), "lsq_argmax_bias", "translator_r64_bias")]
    files = {head_filename(spec, layer, tag) for spec in specs for layer in (1, 12) for tag in (None, "v3", "v3-0a")}
    assert len(files) == len(specs) * 2 * 3
    assert head_filename(HeadSpec("translator", rank=64), 12, "v4096") == "layer12_translator_r64_v4096.safetensors"
    for spec in specs:
        assert HeadSpec.from_name(spec.name) == spec


def test_heads_of_one_layer_are_told_apart_by_their_metadata(tmp_path):
    argmax, biased = dataclasses.replace(META, target="argmax"), dataclasses.replace(META, bias=True)
    small = dataclasses.replace(META, draft_vocab="v3")
    save_head(tmp_path / "a.safetensors", lsq_head(W), META)
    save_head(tmp_path / "b.safetensors", lsq_head(W), argmax)
    save_head(tmp_path / "c.safetensors", lsq_head(W, torch.zeros(VOCAB)), biased)
    save_head(tmp_path / "d.safetensors", lsq_head(W[IDS], None, IDS), small)
    assert [find_head(tmp_path, 3, one.spec).stem for one in (META, argmax, biased)] == ["a", "b", "c"]
    refused = said(HeadError, find_head, tmp_path, 3, HeadSpec("translator"))
    assert "no head for layer 3, translator; it has" in refused and "lsq over v3 at layer 3" in refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HeadSpec("lsq", "argmin"), "target of a lsq head 'argmin'"),
        (lambda: HeadSpec("lens", "argmax"), "allowed: none"),
        (lambda: HeadSpec("lens", bias=True), "a head of kind lens has no bias; kinds that can: lsq, translator"),
        (lambda: HeadSpec.from_name("lsq_argmix"), "head 'lsq_argmix' is not known"),
        (lambda: HeadSpec.from_name("lsq_r3"), "a head of kind lsq has no rank 3"),
        (lambda: HeadSpec.from_name("translator_argmax"), "head 'translator_argmax' is not known"),
        (lambda: HeadSpec.from_name("translator_r0"), "head rank 0 is out of range"),
        (lambda: HeadSpec.from_name("translator_r"), "head 'translator_r' is not known"),
        (lambda: HeadSpec.from_name(""), "head '' is not known"),
    ],
)
def test_what_a_head_cannot_be_is_said(make, message):
    assert message in said(SettingsError, make)


def test_of_two_kinds_that_a_name_begins_with_the_longer_is_meant(monkeypatch):
    class Other(HeadKind):
        name, help = "lens_bias", "its name is also that of a lens with a bias, which there is not"

    monkeypatch.setitem(KINDS._found, "lens_bias", Other())
    assert HeadSpec.from_name("lens_bias") == HeadSpec("lens_bias")


def test_why_another_packages_head_cannot_be_used_is_said(monkeypatch):
    why = "head 'mine' of a package cannot be used: it has no name"
    monkeypatch.setitem(KINDS.broken, "mine", why)
    assert said(SettingsError, HeadSpec.from_name, "mine") == why


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
    assert said(HeadError, save_head, file, head, HeadMetadata(kind, 3, 4, 9)) == f"head {file}: {message}"


def test_a_legacy_head_that_was_saved_on_a_gpu_is_read_to_the_host(tmp_path, monkeypatch):
    file = tmp_path / "h3.pt"
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")  # as PyTorch calls the first GPU
        torch.save(torch.ones(9, 4), file)
    loaded = load_head(file)
    assert loaded.head.weight.device == torch.device("cpu")
    assert loaded.metadata == HeadMetadata("lsq", 3, 4, 9)


def test_a_folder_without_heads_says_so_and_passes_hidden_files_over(tmp_path):
    (tmp_path / ".layer3_lsq.safetensors").write_bytes(b"half written")
    assert said(HeadError, find_head, tmp_path, 3).endswith("it has no head")


CONFIG = {
    "model_type": "llama",
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 300,
    "torch_dtype": "bfloat16",
}


def embedding(dtype=torch.bfloat16, rows=300):
    values = torch.randn(300, 96, generator=torch.Generator().manual_seed(0))
    return torch.cat([values, torch.zeros(rows - 300, 96)]).to(dtype)


def test_fingerprint_does_not_depend_on_how_the_model_is_served():
    name = model_fingerprint(CONFIG, embedding())
    assert len(name) == 16
    assert model_fingerprint(CONFIG, embedding().float()) == name
    assert model_fingerprint(CONFIG, embedding(dtype=torch.float32)) == name
    assert model_fingerprint(CONFIG, embedding(rows=320)) == name  # a padded vocabulary
    assert model_fingerprint({**CONFIG, "torch_dtype": "float32"}, embedding()) == name
    given = embedding()
    with torch.device("meta"):  # vLLM builds models under another default device than a host's tensors are on
        assert model_fingerprint(CONFIG, given) == name


@pytest.mark.parametrize("place", [(0, 0), (299, 0), (0, 95), (299, 95)])
def test_fingerprint_tells_models_apart_and_reaches_every_corner(place):
    changed = embedding()
    changed[place] += 1
    names = {
        model_fingerprint(CONFIG, embedding()),
        model_fingerprint(CONFIG, changed),
        model_fingerprint({**CONFIG, "num_hidden_layers": 3}, embedding()),
    }
    assert len(names) == 3


def test_a_fingerprint_stays_what_it_was():
    """Heads on disk hold it. Of both axes 64 places are taken, and bfloat16 holds every one of these numbers."""
    values = torch.arange(100).unsqueeze(1) % 11 + torch.arange(80) % 7 / 8
    assert model_fingerprint({"vocab_size": 100, "hidden_size": 80}, values) == "ec50ae313b8937fc"
