"""`selfspec fit-weights` on a stand-in for an engine: what is asked of it, and what is said."""

from contextlib import contextmanager

import pytest
from commands import call, document

from selfspec_cli.config.schema import Method, RunConfig, WorkloadConfig
from selfspec_cli.engine.live import Generation
from selfspec_cli.stages import fit_weights

WORK = WorkloadConfig(prompts="random", num_prompts=4, output_len=16, input_len=4)


class FakeEngine:
    max_model_len, vocab_size = 512, 64

    def __init__(self, cfg):
        self.cfg, self.asked = cfg, []

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


@pytest.fixture
def opened(monkeypatch):
    engines = []

    @contextmanager
    def open_engine(cfg):
        engines.append(FakeEngine(cfg))
        yield engines[-1]

    monkeypatch.setattr("selfspec_cli.commands.measuring.shown_starting", lambda shown, forked: open_engine)
    engines.append(open_engine)
    return engines


def test_copies_are_fitted_on_answers_of_the_model_alone(opened, tmp_path):
    (made,) = fit_weights.run(
        [RunConfig(workload=WORK, k=3, results_dir=str(tmp_path), draft_weights="int4")],
        open_engine=opened[0],
        prompts=6,
        out=tmp_path / "c.safetensors",
    )
    engine = opened[1]
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
    shown = call("fit-weights", *words)
    assert shown.exit_code == 0 and "draft_weights=int4 draft_weights_path=" in shown.stdout, shown.output
    refused = call("fit-weights", "workload.prompts=random")
    assert refused.exit_code == 2 and "name the kind of copies to make; allowed: fp8" in refused.output.replace(
        "\n", " "
    )
