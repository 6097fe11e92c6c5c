"""Exit heads: each against a matrix written out, with and without a draft vocabulary."""

import hashlib
import os
from dataclasses import replace

import pytest
import torch
from exit_heads import lens_head, lsq_head, translator_head
from refusals import said
from torch.nn import functional as F

from selfspec_cli.config import model_files
from selfspec_cli.config.facts import ModelFacts
from selfspec_cli.config.model_files import head_folder
from selfspec_cli.config.schema import ConfigError, HeadConfig, RunConfig, head_spec
from selfspec_cli.early_exit import draft_vocab
from selfspec_cli.early_exit.artifact import load_head, save_head
from selfspec_cli.early_exit.draft_vocab import ids_of
from selfspec_cli.early_exit.errors import HeadError
from selfspec_cli.early_exit.head_metadata import HeadMetadata, head_filename
from selfspec_cli.early_exit.head_module import check_vocab_ids, scatter_to_full, with_draft_vocabulary

HIDDEN, VOCAB, RANK = 6, 11, 2
IDS = torch.tensor([1, 4, 5, 9])
GENERATOR = torch.Generator().manual_seed(0)


def rand(*shape):
    return torch.randn(*shape, generator=GENERATOR)


X, LM_HEAD = rand(3, HIDDEN), rand(VOCAB, HIDDEN)
W, BIAS = rand(VOCAB, HIDDEN), rand(VOCAB)
FULL, DOWN, UP, SHIFT = rand(HIDDEN, HIDDEN), rand(RANK, HIDDEN), rand(HIDDEN, RANK), rand(HIDDEN)

HEADS = {
    "lens": (lens_head(), X @ LM_HEAD.T),
    "lsq": (lsq_head(W), X @ W.T),
    "lsq with bias": (lsq_head(W, BIAS), X @ W.T + BIAS),
    "translator": (translator_head(FULL), (X + X @ FULL.T) @ LM_HEAD.T),
    "translator with bias": (translator_head(FULL, bias=SHIFT), (X + X @ FULL.T + SHIFT) @ LM_HEAD.T),
    "low rank": (translator_head(down=DOWN, up=UP, bias=SHIFT), (X + X @ (UP @ DOWN).T + SHIFT) @ LM_HEAD.T),
}


def lm_head(z):
    return z @ LM_HEAD.T


@pytest.mark.parametrize("name", HEADS)
def test_logits_by_callable_and_bound(name):
    head, want = HEADS[name]
    torch.testing.assert_close(head.logits(X, lm_head), want)
    torch.testing.assert_close(F.linear(head.transform(X), *head.bind(LM_HEAD)), want)
    assert (head.bind(LM_HEAD)[0] is LM_HEAD) == (not name.startswith("lsq"))  # the model's own is shared
    ids = torch.tensor([0, 3])
    assert torch.equal(head.to_full_ids(ids), ids)


@pytest.mark.parametrize("name", HEADS)
def test_draft_vocabulary_keeps_the_columns(name):
    head, want = HEADS[name]
    small = with_draft_vocabulary(head, IDS)
    torch.testing.assert_close(small.logits(X, lm_head), want[:, IDS])
    weight, bias = small.bind(LM_HEAD)
    torch.testing.assert_close(F.linear(small.transform(X), weight, bias), want[:, IDS])
    assert weight.shape == (len(IDS), HIDDEN)
    assert small.to_full_ids(torch.tensor([[0, 3]])).tolist() == [[1, 9]]
    assert "already" in said(HeadError, with_draft_vocabulary, small, IDS)


def test_scatter_to_full_is_the_lossless_distribution():
    draft = rand(3, len(IDS))
    full = scatter_to_full(draft, IDS, VOCAB)
    outside = [i for i in range(VOCAB) if i not in IDS]
    assert (full[:, outside] == -torch.inf).all()
    torch.testing.assert_close(full.softmax(-1)[:, IDS], draft.softmax(-1))
    assert torch.equal(full.argmax(-1), IDS[draft.argmax(-1)])


@pytest.mark.parametrize(
    ("ids", "word"),
    [
        (torch.tensor([0, 11]), "11 is out of range; allowed: 0 to 10"),
        (torch.tensor([-1, 3]), "-1 is out of range"),
        (torch.tensor([3, 3]), "ascending"),
        (torch.tensor([4, 3]), "ascending"),
        (torch.arange(12), "larger than the vocabulary of 11"),
        (torch.tensor([], dtype=torch.int64), "empty"),
        (torch.tensor([1.0]), "token ids"),
        (torch.zeros(1, 1, dtype=torch.int64), "token ids"),
    ],
)
def test_bad_draft_vocabularies(ids, word):
    assert word in said(HeadError, check_vocab_ids, ids, VOCAB)
    assert word in said(HeadError, with_draft_vocabulary, lsq_head(torch.zeros(VOCAB, 2)), ids)


@pytest.mark.parametrize(
    "make",
    [
        lambda: lsq_head(W[0]),
        lambda: lsq_head(W, BIAS[:3]),
        lambda: lsq_head(W, vocab_ids=IDS),
        lambda: translator_head(),
        lambda: translator_head(FULL, down=DOWN, up=UP),
        lambda: translator_head(FULL, down=DOWN),
        lambda: translator_head(down=DOWN),
        lambda: translator_head(down=DOWN, up=UP.T),
        lambda: translator_head(W),
        lambda: translator_head(FULL, bias=BIAS),
        lambda: lens_head(torch.tensor([0, VOCAB])).bind(LM_HEAD),
    ],
)
def test_shapes_that_do_not_fit(make):
    with pytest.raises(HeadError):
        make()


def test_rows_that_somebody_else_keeps_are_given_up():
    head = lsq_head(torch.zeros(3, 4), torch.zeros(3), torch.tensor([1, 4, 5]))
    head.drop_rows()
    assert not head.tensors
    assert not list(head.parameters())
    assert head.transform(torch.ones(1, 4)).tolist() == [[1.0] * 4]
    assert head.to_full_ids(torch.tensor([2])).tolist() == [5]


# ---- draft vocabularies, and the files of heads over them: derived from the full head, derived again when it chang----


WIDTH, TOKENS, LAYER = 4, 9, 3
COUNTS = torch.tensor([5, 0, 9, 1, 1, 0, 7, 0, 0])


@pytest.fixture
def cfg(tmp_path):
    return RunConfig(head_dir=str(tmp_path), layer=LAYER)


def fitted(cfg, kind="lsq", **more):
    """A head of some kind in the head folder of `cfg`."""
    more.setdefault("target", {"lsq": "next_token", "translator": "final_hidden"}[kind])
    weight = torch.randn(TOKENS if kind == "lsq" else WIDTH, WIDTH)
    head = lsq_head(weight) if kind == "lsq" else translator_head(weight)
    metadata = HeadMetadata(kind, LAYER, WIDTH, TOKENS, fingerprint="abc", **more)
    save_head(head_folder(cfg) / head_filename(metadata.spec, LAYER), head, metadata)
    return head


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "heads"


def found(cfg):
    return model_files.head_file(cfg, LAYER, WIDTH, TOKENS, lambda: COUNTS)


def test_counts_of_the_fitted_text_come_first(cfg):
    assert load_head(found(replace(cfg, vocab="3"))).head.vocab_ids.tolist() == [0, 2, 6]
    draft_vocab.save_counts(head_folder(cfg), COUNTS.flip(0), "a text")
    assert load_head(found(replace(cfg, vocab="3"))).head.vocab_ids.tolist() == [2, 6, 8]


@pytest.mark.parametrize("kind", ["lsq", "translator"])
def test_a_derived_head_keeps_rows_and_metadata(cfg, cache, kind):
    head = fitted(cfg, kind)
    small = replace(cfg, head=HeadConfig(kind=kind), vocab="3")
    path = found(small)
    assert path.parent == cache and path.name.startswith(f"layer3_{kind}_v3-")
    loaded = load_head(path, layer=LAYER, fingerprint="abc")
    assert loaded.metadata.draft_vocab == "v3"
    assert torch.equal(loaded.head.weight, head.weight[[0, 2, 6]] if kind == "lsq" else head.weight)
    assert found(replace(small, vocab="full")).name == f"layer3_{kind}.safetensors"
    before = path.stat().st_mtime_ns
    assert found(small).stat().st_mtime_ns == before  # nothing to do


def test_a_head_fitted_again_is_derived_again_whatever_its_time(cfg):
    fitted(cfg)
    small = replace(cfg, head=HeadConfig(kind="lsq"), vocab="3")
    first = found(small)
    head = fitted(cfg)
    os.utime(model_files.full_head(small, LAYER), ns=(1, 1))
    assert found(small) != first
    assert torch.equal(load_head(found(small)).head.weight, head.weight[[0, 2, 6]])


def test_a_folder_of_the_user_is_only_read(cfg, tmp_path, cache):
    """Two engines over a draft vocabulary: the second once found the first's derived head in the folder, and refused
    it as ambiguous."""
    fitted(cfg)
    folder = head_folder(cfg)
    before = sorted(folder.iterdir())
    own = replace(cfg, head=HeadConfig(path=str(folder)), vocab="3")
    assert found(own) == found(own)
    assert sorted(folder.iterdir()) == before
    found(cfg)
    os.chmod(folder, 0o500)
    assert found(replace(own, vocab="2")).parent == cache


def test_a_damaged_derived_head_is_made_again_and_a_full_disk_says_so(cfg, monkeypatch):
    fitted(cfg)
    small = replace(cfg, head=HeadConfig(kind="lsq"), vocab="3")
    path = found(small)
    path.write_bytes(path.read_bytes()[:-3])
    assert load_head(found(small)).metadata.draft_vocab == "v3"

    def full(*args, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("selfspec_cli.early_exit.artifact.save_file", full)
    with pytest.raises(ConfigError, match=r"No space left.*XDG_CACHE_HOME"):
        found(replace(small, vocab="4"))
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_tag_of_a_list_is_the_digest_of_its_ids():
    """It is part of the names of files: another tag would fit heads anew."""
    digest = hashlib.sha256(b"1,8").hexdigest()[:8]
    assert draft_vocab.tag_of("list.txt", torch.tensor([1, 8])) == f"v2-{digest}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 9", "id 9 is out of range; allowed: 0 to 8"),
        ("", "empty"),
        ("[true]", "other than integers"),
        ("one", "no list of token ids"),
    ],
)
def test_bad_lists_are_refused(cfg, tmp_path, text, words):
    (tmp_path / "list").write_text(text)
    assert words in said(HeadError, found, replace(cfg, vocab=str(tmp_path / "list")))
    assert "10 is out of range; allowed: 1 to 9" in said(HeadError, found, replace(cfg, vocab="10"))


def test_dummy_weights_need_no_text(cfg):
    cfg.model = replace(cfg.model, load_format="dummy")
    path = model_files.head_file(replace(cfg, vocab="3"), LAYER, WIDTH, TOKENS, lambda: 1 / 0)
    assert load_head(path).head.vocab_ids.tolist() == [0, 3, 6]


def test_a_head_that_is_not_there_says_how_to_fit_it(cfg):
    lsq, argmax = (replace(cfg, head=HeadConfig(kind="lsq", target=target)) for target in (None, "argmax"))
    assert "selfspec fit-lsq --layer 3" in said(ConfigError, found, lsq)
    assert "selfspec fit head=lsq_argmax layer=3" in said(ConfigError, found, argmax)
    fitted(cfg)
    assert found(lsq).is_file()
    assert "lsq at layer 3" in said(ConfigError, found, argmax)


def test_a_folder_of_heads_and_a_legacy_file(cfg, tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    torch.save({"weight": torch.randn(TOKENS, WIDTH)}, folder / "ee_layer3_lsq.pt")
    torch.save({"weight": torch.randn(TOKENS, WIDTH)}, folder / "h5.pt")
    old = replace(cfg, head=HeadConfig(kind="lsq", path=str(folder)))
    assert found(old).name == "ee_layer3_lsq.pt"
    small = found(replace(old, vocab="3"))
    assert small.name.startswith("layer3_lsq_v3-")
    assert load_head(small).metadata.draft_vocab == "v3"
    torch.save({"weight": torch.nn.Linear(2, 2)}, folder / "h5.pt")
    damaged = replace(old, head=HeadConfig(kind="lsq", path=str(folder / "h5.pt")))
    assert "something other than tensors" in said(HeadError, check, damaged, 5)


# ---- what is known before a model is loaded --------------------------------------------------------------------------


def check(cfg, layer=LAYER, hidden=WIDTH, vocab_size=TOKENS):
    model_files.check_head(cfg, layer, ModelFacts(hidden=hidden, vocab_size=vocab_size))


def test_a_head_of_another_layer_or_shape_is_refused_from_its_header(cfg):
    fitted(cfg)
    path = head_folder(cfg) / "layer3_lsq.safetensors"
    for own in (HeadConfig(kind="lsq"), HeadConfig(path=str(path)), HeadConfig(path=str(path.parent))):
        given = replace(cfg, head=own)
        check(given)
        check(given, hidden=None, vocab_size=None)  # a model of which nothing is known here
        assert "hidden is 4, this model's is 8" in said(HeadError, check, given, hidden=8)
        assert "vocab_size is 9, this model's is 10" in said(HeadError, check, given, vocab_size=10)
    assert "is for layer 3; layer 2 is asked for" in said(
        HeadError, check, replace(cfg, head=HeadConfig(path=str(path))), 2
    )
    check(cfg, 2, 7, 7)  # the lens is of every model


def test_a_file_is_called_what_it_holds(cfg, tmp_path):
    """A row of head.path=x_lsq.safetensors once said "lens"."""
    fitted(cfg, "lsq", target="argmax")
    fitted(cfg, "translator")
    folder = head_folder(cfg)
    for file, name in (("layer3_lsq_argmax", "lsq_argmax"), ("layer3_translator", "translator")):
        given = replace(cfg, head=HeadConfig(path=str(folder / f"{file}.safetensors")))
        assert head_spec(given.head, given.layer).name == name
        check(given)
    assert head_spec(HeadConfig(path=str(tmp_path / "ee_layer3_lsq.pt"))).name == "lsq"
    assert head_spec(HeadConfig(path=str(tmp_path / "gone.safetensors"))).name == "lens"
    given = replace(given, head=HeadConfig(kind="lsq", path=given.head.path))
    assert said(ConfigError, check, given) == f"head=lsq with head.path={given.head.path}: the file holds translator"
    (folder / "layer3_lsq_argmax.safetensors").unlink()
    assert head_spec(HeadConfig(path=str(folder)), LAYER).name == "translator"


def test_in_a_speculative_config_a_number_means_the_first_ids(tmp_path):
    assert ids_of("full", 9) is None
    assert ids_of("4", 9).tolist() == [0, 1, 2, 3]
    assert ids_of("9", 9).tolist() == list(range(9))
    file = tmp_path / "ids.txt"
    file.write_text("7 2")
    assert ids_of(str(file), 9).tolist() == [2, 7]
    assert ids_of("1", 9).tolist() == [0]
    assert "allowed: 0 to 6" in said(HeadError, ids_of, str(file), 7)
    for size in ("0", "10"):
        assert f"vocab = {size} is out of range; allowed: 1 to 9" in said(HeadError, ids_of, size, 9)
