"""Fitting heads and copies through live engines: the data are right, what is fitted drafts losslessly and better than
what is not, what is wrong is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import greedy, layer_skip, live, tokens
from models import LAYERS, VOCAB, save_tiny
from safetensors import safe_open
from test_skip_and_heads import own_bytes
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from selfspec_cli.config.schema import EngineConfig, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.early_exit.artifact import load_head
from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.equations import FitError, NormalEquations
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.fitting import fit_head
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.head_metadata import read_metadata
from selfspec_cli.early_exit.heads import HEADS, HeadSpec, examples
from selfspec_cli.early_exit.replay import Setting, draft_lengths
from selfspec_cli.stages import fit
from selfspec_cli.texts import corpora
from selfspec_cli.vllm_plugin.exit_head import gathered, sharded, split
from selfspec_cli.vllm_plugin.weights.copied import copied as on_copy

EXITS = (2, LAYERS // 2)
PAIRS, RIDGE = 3000, 1e-3
NAMES = ("lens", "lsq", "lsq_argmax", "lsq_bias", "translator", "translator_r4", "translator_bias")
SOME = range(0, 32, 4)
INPUT, OUTPUT, PROMPTS = 24, 64, 12


def config(path: Path, folder: Path, **changes: Any) -> RunConfig:
    """A run on a tiny model: fp32, eager, no tokenizer."""
    return RunConfig(
        model=ModelConfig(name="tiny", path=str(path)),
        engine=EngineConfig(enforce_eager=True, kv_cache_gib=0.0625, max_num_batched_tokens=4096),
        workload=WorkloadConfig(input_len=INPUT, output_len=OUTPUT, prompts="random"),
        head_dir=str(folder),
        **changes,
    )


@pytest.fixture(scope="module")
def fitted(expected: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Every head at two exits in one pass, over all tokens and over a list of a quarter of them: its reports by (layer,
    head, vocabulary), the model's path, and the folder of the heads."""
    path, folder = expected("llama").path, tmp_path_factory.mktemp("heads")
    (folder / "quarter.txt").write_text(" ".join(map(str, range(1, VOCAB, 4))))
    done = fit.run(
        config(path, folder),
        fit.Request(EXITS, NAMES, PAIRS, RIDGE, ("full", str(folder / "quarter.txt")), corpus="random"),
    )
    reports = {(r["layer"], r["head"], "full" if r["vocab"] == "full" else "quarter"): r for r in done.reports}
    assert len(reports) == len(done.reports) == len(EXITS) * len(NAMES) * 2
    return SimpleNamespace(path=path, folder=folder, reports=reports)


def test_every_head_is_saved_under_a_name_of_its_own(fitted, report):
    paths = [found["path"] for key, found in fitted.reports.items() if key[1:] != ("lens", "full")]
    assert len(set(paths)) == len(paths) == len(fitted.reports) - len(EXITS)
    for (layer, name, vocab), found in fitted.reports.items():
        report(f"E={layer} {name} {vocab}: {found['agreement']:.3f} of text")
        if (name, vocab) == ("lens", "full"):
            continue
        metadata = read_metadata(found["path"])
        assert (metadata.layer, metadata.spec.name) == (layer, name)
        assert (metadata.draft_vocab is None) == (vocab == "full")
        assert metadata.pairs == (None if name == "lens" else PAIRS)
    (folder,) = {Path(path).parent for path in paths}
    assert folder.parent == fitted.folder and folder.name.startswith("tiny-")  # and the model's fingerprint
    assert {file.suffix for file in folder.iterdir()} == {".safetensors"}


def test_heads_are_as_good_as_their_data_allow(fitted):
    """A translator beats the lens on a model that was not trained for early exit; a small vocabulary costs."""
    for layer in EXITS:
        shares = {name: fitted.reports[layer, name, "full"]["agreement"] for name in NAMES}
        assert shares["translator"] > shares["lens"]
        assert shares["lsq_argmax"] > shares["lsq"]  # the text is random: its next token is anything
        for name in NAMES:
            small = fitted.reports[layer, name, "quarter"]
            assert small["agreement"] <= shares[name]
            assert small["bytes_per_step"] < fitted.reports[layer, name, "full"]["bytes_per_step"]


def test_the_fit_is_that_of_transformers_hidden_states(fitted):
    """The same windows through transformers, whole and without vLLM, give the same least-squares head."""
    model = AutoModelForCausalLM.from_pretrained(fitted.path, dtype=torch.float32).eval()
    length = 511  # the model takes 512 tokens, one of which the engine generates
    windows = corpora.load("random").windows("fitting", None, VOCAB, length, -(-PAIRS // (length - 1)) + 2, seed=0)
    sums, room = NormalEquations(64, VOCAB), PAIRS
    for window in windows:
        ids = torch.tensor([window])
        with torch.no_grad():
            states = model(input_ids=ids, output_hidden_states=True).hidden_states[EXITS[0]][0]
            x = model.model.norm(states)[:-1][:room]
        sums.update(x, ids[0, 1:][: len(x)])
        room -= len(x)
    assert room == 0
    want, report = fit_head(HeadSpec("lsq"), sums, RIDGE)
    found = fitted.reports[EXITS[0], "lsq", "full"]
    fitted_head = load_head(found["path"])
    scale = fitted_head.metadata.fit.get("scale", 1.0)  # on a random text there may be none
    torch.testing.assert_close(fitted_head.head.weight / scale, want.weight, rtol=1e-2, atol=1e-4)
    assert found["residual"] == pytest.approx(report.residual, rel=1e-4)
    assert found["pairs"] == report.pairs == PAIRS


KEYS = [
    (2, "lsq", "full"),
    (4, "lens", "full"),
    (4, "lsq_argmax", "quarter"),
    (4, "translator", "quarter"),
    (4, "translator_r4", "quarter"),
    (2, "translator_bias", "full"),
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_fitted_heads_draft_losslessly(fitted, expected, report, key):
    found, k = fitted.reports[key], 3
    prompts = corpora.load("random").windows("held_out", None, VOCAB, INPUT, PROMPTS, seed=1000)
    with live(fitted.path, layer_skip(key[0], k, head_path=found.get("path")), max_num_batched_tokens=512) as engine:
        paid = own_bytes(load_head(found["path"]).head) if "path" in found else 0
        assert engine.call("early_exit_weights")["draft"] == paid
        outputs = tokens(engine.generate(prompts, [greedy(OUTPUT)] * PROMPTS))
        made = engine.counts()
        # `lsq` was fitted to random text, whose next token is anything: hardly any of its drafts is accepted, or none.
        assert made.drafted > 0 and (made.accepted > 0 or key[1] == "lsq"), made
        expected("llama").check(engine, SOME).require_both_verdicts()
    generated = sum(map(len, outputs)) - len(outputs)  # the first token of each comes from its prefill
    report(f"{key}: {generated / made.rounds:.3f} tokens a round")


def test_rows_split_over_ranks_are_the_same_projection(fitted):
    """On one rank, which is what a CPU has; the gather itself is vLLM's."""
    torch.manual_seed(0)
    weight, bias, x = torch.randn(100, 64), torch.randn(100), torch.randn(5, 64)  # 100 rows are padded to 128
    with live(fitted.path) as engine:
        config = engine.llm.llm_engine.vllm_config
        rows = split(weight, config)
        projection = sharded(rows, 100, bias, config)
        torch.testing.assert_close(projection.logits(x), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
        assert torch.equal(gathered(rows.weight, 100), weight)
        assert projection.copied is None
        copied = sharded(on_copy(DRAFT_WEIGHTS["int8"], torch.float32, rows, "lm_head"), 100, bias, config)
        copy, added = copied.copied
        assert added is None  # to the product; the projection adds its own to all rows
        torch.testing.assert_close(copied.logits(x), copy(x)[:, :100] + bias)


def test_states_that_are_not_finite_are_named_by_token(tmp_path):
    """A model with one broken embedding: the message counts tokens from the start of the stream."""
    window = corpora.load("random").windows("fitting", None, VOCAB, 511, 1, seed=0)[0]
    path = save_tiny("llama", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[window[100]] = float("nan")
    model.save_pretrained(path)
    first = window.index(window[100])
    with pytest.raises(FitError, match=r"hidden state of token \d+ .*has nan") as caught:
        fit.run(config(path, tmp_path / "heads"), fit.Request((2,), pairs=600, ridge=1.0, corpus="random"))
    # vLLM's attention on the CPU works on blocks of 32 queries, and NaN passes its mask inside a block.
    assert first // 32 * 32 <= int(str(caught.value).split()[4]) <= first
    assert not (tmp_path / "heads").exists()


# ---- copies -------------------------------------------------------------------------------------------------------


def test_fitted_copies_draft_better_and_the_output_is_the_targets(expected, tmp_path):
    want, counts = expected("llama"), {}
    file = tmp_path / "int4.safetensors"
    with live(want.path) as engine:
        engine.call("early_exit_observe", [0])
        with pytest.raises(SettingsError, match="no activations were collected"):
            engine.call("early_exit_fit_weights", str(file), "int4", {})
        engine.call("early_exit_observe")
        engine.generate(want.prompts[1::2], greedy(48))
        report = engine.call("early_exit_fit_weights", str(file), "int4", {"by": "a test"})
        want.check(engine, [0])  # the hooks are off, and nothing of the model has changed
    assert report["tokens"] > 500 and len(report["layers"]) == 4 * LAYERS + 1
    for name, error in report["layers"].items():
        assert 0 < error["fitted"] < error["nearest"], name
    with safe_open(file, framework="pt") as opened:
        about = opened.metadata()
    assert (about["kind"], about["tokens"]) == ('"int4"', str(report["tokens"]))
    for path in (None, str(file)):
        with live(want.path, layer_skip(LAYERS, 3, draft_weights="int4", draft_weights_path=path)) as engine:
            counts[path] = want.check(engine, SOME)
            counts[path].require_both_verdicts()
    share = {path: count.accepted / count.drafted for path, count in counts.items()}
    assert share[str(file)] > share[None], share
    other = expected("qwen3")
    spec = layer_skip(LAYERS, 3, draft_weights="int4", draft_weights_path=str(file))
    with pytest.raises(SettingsError, match="was made of another model"), live(other.path, spec):
        pass


# ---- A head and a gate from somebody else's package (tests/packages/toy): found by its entry points, fitted, saved and
# loaded in vLLM, with no edit of selfspec


TOY = Path(__file__).parents[1] / "packages" / "toy"


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package is installed: its folder, with its metadata, is on the path."""

    def forget() -> None:
        for registry in (HEADS, GATES):
            vars(registry).pop("_loaded", None)

    monkeypatch.syspath_prepend(str(TOY))
    forget()
    yield
    forget()


def test_a_head_and_a_gate_of_another_package_draft(toy, expected, tmp_path):
    """The head is fitted and saved; the gate is swept over its threshold and recorded like one of ours."""
    want, names, k, drafted = expected("llama"), ("lens", "one_direction", "translator_r1"), 5, []
    assert "one_direction" in examples()
    done = fit.run(config(want.path, tmp_path), fit.Request(EXITS[1:], names, 2000, ridge=1e-3, corpus="random"))
    found = {report["head"]: report for report in done.reports}
    assert found["one_direction"]["agreement"] == pytest.approx(found["translator_r1"]["agreement"], abs=0.01)
    head = found["one_direction"]
    assert read_metadata(head["path"]).spec == HeadSpec.from_name("one_direction")
    assert head["parameters"] == 2 * 64
    with live(want.path, layer_skip(EXITS[1], k, head_path=head["path"], gate="ratio", threshold=0.5)) as engine:
        for threshold in (None, 0.2, 0.5, 0.8, 1.0):
            if threshold is not None:  # the first point is as the engine was started
                engine.call("early_exit_set_gate", "ratio", threshold)
            engine.call("early_exit_record", True)
            want.check(engine, SOME).require_both_verdicts()
            log = DraftLog.from_plain(engine.call("early_exit_recorded"), k)
            # What was recorded is the gate's own definition, in terms of what other gates recorded beside it.
            maxp, margin, ratio = (log.feature(name)[log.was_drafted] for name in ("maxp", "margin", "ratio"))
            torch.testing.assert_close(ratio, (maxp - margin) / maxp, atol=1e-5, rtol=1e-4)
            assert torch.equal(draft_lengths(log, Setting("ratio", threshold or 0.5, k)), log.drafted)
            drafted.append(float(log.drafted.float().mean()))
    assert drafted[0] == drafted[2]
    assert drafted[1] < drafted[2] < drafted[3] < drafted[4] == pytest.approx(k, rel=0.1)
