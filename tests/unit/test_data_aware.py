"""Copies made for data: rounding by GPTQ against an independent reference, the file, and `selfspec fit-weights`."""

from contextlib import nullcontext

import pytest
import torch
from commands import call, document, done, refused
from refusals import said
from safetensors.torch import save_file

from selfspec_cli.config.schema import Method, RunConfig, WorkloadConfig
from selfspec_cli.early_exit import fitted_weights
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.fitted_weights import DAMPING, About, FittedWeights, rounded_in_order, weighted_error
from selfspec_cli.engine.live import Generation
from selfspec_cli.stages import fit

OUT, IN, GROUP = 24, 128, 64


@pytest.fixture
def data():
    """A weight, and the second moment of inputs that use some directions much more than others."""
    torch.manual_seed(0)
    mix = torch.randn(IN, IN) * torch.logspace(0, -2, IN).unsqueeze(1)
    x = torch.randn(4096, IN) @ mix
    return torch.randn(OUT, IN) * 0.1, x.T @ x / len(x)


def one_scale(block, importance):
    return block.abs().amax(1, keepdim=True) / 7


def slow_gptq(weight, moment):
    """One column after the other, each time with the inverse over the columns that are left: the paper's first form."""
    damped = moment.double() + DAMPING * moment.diagonal().mean().double() * torch.eye(IN, dtype=torch.float64)
    work, result = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    for column in range(IN):
        if column % GROUP == 0:
            scale = work[:, column : column + GROUP].abs().amax(1) / 7
        inverse = torch.linalg.inv(damped[column:, column:])
        rounded = (work[:, column] / scale).round().clamp(-8, 7)
        result[:, column] = rounded * scale
        error = (work[:, column] - rounded * scale) / inverse[0, 0]
        work[:, column:] -= error.unsqueeze(1) * inverse[0].unsqueeze(0)
    return result


def test_rounding_is_gptqs(data):
    weight, moment = data
    q, scales = rounded_in_order(weight, moment, GROUP, (-8, 7), one_scale)
    assert q.shape == (OUT, IN // GROUP, GROUP) and scales.shape == (OUT, IN // GROUP, 1)
    assert q.min() >= -8 and q.max() <= 7 and q.equal(q.round())
    found, wanted = (q * scales).flatten(1), slow_gptq(weight, moment).float()
    # A value that lies between two integers may fall either way in single precision, and what follows with it.
    assert (found - wanted).abs().lt(1e-4).float().mean() > 0.97
    assert weighted_error(found - weight, moment) == pytest.approx(weighted_error(wanted - weight, moment), rel=0.02)


def test_small_inputs_round_as_large_ones(data):
    weight, moment = data
    small, large = (rounded_in_order(weight, moment * size, GROUP, (-8, 7), one_scale)[0] for size in (1e-4, 1.0))
    assert (small == large).float().mean() > 0.97


def test_data_without_structure_and_kinds_that_cannot_use_data_change_nothing(data):
    weight, moment = data
    for name, of_data in (("int4", torch.eye(IN)), ("fp8", moment)):
        rounded, fitted = DRAFT_WEIGHTS[name].quantise(weight), DRAFT_WEIGHTS[name].fit(weight, of_data)
        assert rounded.keys() == fitted.keys()
        assert all(rounded[part].equal(tensor) for part, tensor in fitted.items())


def made(kind="int4", fingerprint="abc"):
    torch.manual_seed(1)
    copies = {
        name: DRAFT_WEIGHTS[kind].quantise(torch.randn(OUT, IN)) for name in ("layers.0.mlp.down_proj", "lm_head")
    }
    return FittedWeights(About(kind, fingerprint, 99, more={"corpus": "chat"}), copies)


def test_a_file_holds_what_was_saved(tmp_path):
    fitted = made()
    path = fitted_weights.save(tmp_path / "new" / "folder" / "copies.safetensors", fitted)
    read = fitted_weights.load(path, "int4", "abc")
    assert read.about == fitted.about
    for name, copy in fitted.copies.items():
        assert all(read.copies[name][key].equal(tensor) for key, tensor in copy.items())
    assert [file.name for file in path.parent.iterdir()] == ["copies.safetensors"]


def test_a_stored_copy_takes_the_place_of_one_that_is_made():
    fitted, weight = made(), torch.zeros(OUT, IN)
    kind = DRAFT_WEIGHTS["int4"]
    stored = fitted.kind_of("lm_head")
    whole = kind.dequantise(fitted.copies["lm_head"], torch.float32)
    assert stored.dequantise(stored.quantise(weight), torch.float32).equal(whole)
    rows = torch.tensor([3, 1])
    some = fitted.kind_of("lm_head", rows)
    assert some.dequantise(some.quantise(weight[rows]), torch.float32).equal(whole[rows])
    shapes = "the fitted copy has shape (24, 128), and the weight (24, 64)"
    assert shapes in said(SettingsError, stored.quantise, torch.zeros(OUT, 64))


def test_other_kinds_other_models_and_other_files_are_refused(tmp_path):
    suffix = "copies.pt': fitted copies are saved as .safetensors"
    assert suffix in said(SettingsError, fitted_weights.save, tmp_path / "copies.pt", made())
    path = fitted_weights.save(tmp_path / "copies.safetensors", made())
    kind = said(SettingsError, fitted_weights.load, path, "int8", "abc")
    assert "holds int4 copies, and draft_weights is 'int8'" in kind and "int4" in kind.partition("allowed: ")[2]
    assert said(SettingsError, fitted_weights.load, path, "int4", "xyz").startswith(
        f"draft_weights_path = '{path}' was made of another model: its fingerprint is abc, this model's is xyz"
    )
    missing = tmp_path / "missing.safetensors"
    assert f"'{missing}' cannot be read" in said(SettingsError, fitted_weights.load, missing, "int4", "abc")
    (tmp_path / "torn.safetensors").write_bytes(path.read_bytes()[:100])
    assert "cannot be read" in said(SettingsError, fitted_weights.load, tmp_path / "torn.safetensors", "int4", "abc")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    other = said(SettingsError, fitted_weights.load, tmp_path / "other.safetensors", "int4", "abc")
    assert "no file that selfspec fit-weights wrote" in other


# ---- the command -----------------------------------------------------------------------------------------------------


WORK = WorkloadConfig(prompts="random", num_prompts=4, output_len=16, input_len=4)


class FakeEngine:
    max_model_len, vocab_size = 512, 64

    def open(self, cfg):
        self.cfg, self.asked = cfg, []
        return nullcontext(self)

    def generate(self, prompts, output_len, *, batch, temperature=0.0, seed=0):
        self.asked.append((batch, temperature, seed))
        return Generation([[len(prompt)] * output_len for prompt in prompts], 1.0, [], None)

    def call(self, method, *args):
        if method == "early_exit_observe":
            return None
        assert method == "early_exit_fit_weights"
        self.fitted = args
        errors = {"layers.0": {"nearest": 0.4, "fitted": 0.2}, "layers.1": {"nearest": 0.2, "fitted": 0.1}}
        return {"layers": errors, "tokens": 123}


def test_copies_are_fitted_on_answers_of_the_model_alone(monkeypatch, tmp_path):
    engine = FakeEngine()
    monkeypatch.setattr("selfspec_cli.commands.measuring.shown_starting", lambda shown, forked: engine.open)
    cfg = RunConfig(workload=WORK, k=3, results_dir=str(tmp_path), draft_weights="int4")
    (made,) = fit.run_weights([cfg], open_engine=engine.open, prompts=6, out=tmp_path / "c.safetensors")
    assert engine.cfg.method is Method.baseline and engine.cfg.draft_weights == "shared"
    assert engine.cfg.engine.enforce_eager and engine.asked == [(6, 0.0, 1)]
    assert engine.fitted[:2] == (str(tmp_path / "c.safetensors"), "int4")
    assert made.tokens == 123 and made.medians == pytest.approx({"nearest": 0.3, "fitted": 0.15})
    words = [f"{name}={tmp_path}" for name in ("head_dir", "results_dir")]
    words += ["draft_weights=int4", "workload.prompts=random"]
    planned = document(call("fit-weights", "draft_weights=int4,int8", "--dry-run", "--json"))
    assert [name.rpartition("/")[2] for name in planned["files"]] == [
        f"weights-{kind}.safetensors" for kind in ("int4", "int8")
    ]
    assert call("fit-weights", "draft_weights=int4,int8", "--out", "x.safetensors").exit_code == 2
    assert "draft_weights=int4 draft_weights_path=" in done("fit-weights", *words).stdout
    assert "name the kind of copies to make; allowed: fp8" in refused("fit-weights", "workload.prompts=random")
