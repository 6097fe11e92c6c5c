"""`selfspec views` and `selfspec fit-weights` on stand-ins for engines: what is asked of them, and what is said."""

import csv
import itertools
import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
from commands import call, document

from selfspec_cli import interrupts
from selfspec_cli.config.schema import ConfigError, Method, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.early_exit.counters import VerifyCounts
from selfspec_cli.early_exit.layers import skipped_layers
from selfspec_cli.engine.live import Generation
from selfspec_cli.progress import Progress
from selfspec_cli.record.view_rows import row, wilson
from selfspec_cli.stages import fit_weights, views
from selfspec_cli.stages.views import search

WORK = WorkloadConfig(prompts="random", num_prompts=4, output_len=16, input_len=4)
LOSS = {9: 0.02, 10: 0.05, 4: 0.1}  # of acceptance, by layer; other layers cost 0.5


class FakeEngine:
    """Accepts a share of the drafts that depends on the view alone, and counts as vLLM does."""

    max_model_len, vocab_size, num_layers = 512, 64, 24

    def __init__(self, cfg):
        self.cfg, self.view, self.k, self.asked = cfg, cfg, cfg.k, []

    def set_view(self, cfg):
        self.view = cfg

    def set_draft_length(self, k):
        self.k = k

    def generate(self, prompts, output_len, *, batch, temperature=0.0, seed=0):
        self.asked.append((self.k, batch, temperature, seed))
        outputs = [[len(prompt)] * output_len for prompt in prompts]
        if self.cfg.method is Method.baseline or not self.k:
            return Generation(outputs, 1.0, [], None)
        rate = {"shared": 1.0, "int8": 0.9, "int4": 0.5}[self.view.draft_weights]
        for layer in skipped_layers(self.view.skip_layers):
            rate -= LOSS.get(layer, 0.5)
        rounds = 1000
        at = [round(rounds * max(rate, 0.0) ** (i + 1)) for i in range(self.k)]
        return Generation(outputs, 1.0, [], VerifyCounts(rounds, rounds * self.k, sum(at), at))

    def call(self, method, *args):
        if method == "early_exit_step_bytes":
            share = (24 - len(skipped_layers(self.view.skip_layers))) / 24
            return {"full": 1e6, "draft": 1e6 * share, "full_kv_token": 0.0, "draft_kv_token": 0.0}
        if method == "early_exit_fit_weights":
            self.fitted = args
            errors = {"layers.0": {"nearest": 0.4, "fitted": 0.2}, "layers.1": {"nearest": 0.2, "fitted": 0.1}}
            return {"layers": errors, "tokens": 123}
        assert method == "early_exit_observe"
        return None


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


def config(tmp_path, **changes):
    return RunConfig(**{"workload": WORK, "k": 3, "results_dir": str(tmp_path)} | changes)


def test_every_view_is_measured_on_one_engine(opened, tmp_path):
    cfgs = [config(tmp_path, draft_weights=name, layer=24) for name in ("int8", "int4")]
    found = views.run(cfgs, open_engine=opened[0])
    engine = opened[1]
    assert len(opened) == 2 and engine.cfg.engine.enforce_eager
    assert [(one.draft_weights, one.at) for one in found.rows] == [("int8", [900, 810, 729]), ("int4", [500, 250, 125])]
    assert [one.rates for one in found.rows] == [pytest.approx([0.9] * 3), pytest.approx([0.5] * 3)]
    assert all((one.identical, one.outputs) == (4, 4) for one in found.rows)
    # 8.25 and 4.25 of 16 bits; 1.875 tokens for 1 + 3 c steps, 1.5 for 1 + c.
    assert [one.cost for one in found.rows] == pytest.approx([8.25 / 16, 4.25 / 16])
    assert found.rows[1].predicted == pytest.approx(max((2 - 0.5**k) / (1 + k * 4.25 / 16) for k in (1, 2, 3)))
    assert found.best is found.rows[0] or found.rows[0].predicted <= found.rows[1].predicted
    saved = json.loads((tmp_path / "views.json").read_text())
    assert [one["at"] for one in saved["rows"]] == [one.at for one in found.rows]
    with open(tmp_path / "views.csv", encoding="utf-8") as file:
        assert [one["at"] for one in csv.DictReader(file)] == ["900 810 729", "500 250 125"]


def test_layers_are_looked_for_with_one_draft_and_measured_with_all(opened, tmp_path):
    found = views.run([config(tmp_path, draft_weights="int8", layer=24)], open_engine=opened[0], drop=2)
    assert [step.skipped for step in found.steps] == [(9,), (9, 10)]
    assert [one.skip_layers for one in found.rows] == [None, "9", "9-10"]
    assert found.rows[2].cost == pytest.approx(22 / 24 * 8.25 / 16)
    lengths = [k for k, *_ in opened[1].asked]
    assert set(lengths[: found.steps[-1].asked]) == {1} and set(lengths[found.steps[-1].asked :]) == {0, 3}


def test_sampled_answers_are_not_compared(opened, tmp_path):
    work = WorkloadConfig(prompts="random", num_prompts=4, output_len=16, input_len=4, temperature=0.8)
    found = views.run([config(tmp_path, draft_weights="int8", layer=24, workload=work)], open_engine=opened[0])
    assert found.rows[0].identical is None and found.rows[0].temperature == 0.8
    assert opened[1].asked == [(3, 4, 0.8, 0)]


def test_drafts_that_are_drawn_take_an_engine_of_their_own(opened, tmp_path):
    work = replace(WORK, temperature=0.8)
    cfgs = [
        config(tmp_path, draft_weights=name, layer=24, workload=work, draft_sample_method=taken)
        for name in ("int8", "int4")
        for taken in ("greedy", "probabilistic")
    ]
    found = views.run(cfgs, open_engine=opened[0])
    assert [engine.cfg.draft_sample_method for engine in opened[1:]] == ["greedy", "probabilistic"]
    assert [one.label for one in found.rows] == [
        "E=24 int8",
        "E=24 int4",
        "E=24 int8 probabilistic",
        "E=24 int4 probabilistic",
    ]
    assert [one.draft_sample_method for one in found.rows] == [None, None, "probabilistic", "probabilistic"]
    assert views.facts(cfgs, 0)["views"][1:3] == [
        "E=24 int8 skip_layers= draft_sample_method=probabilistic",
        "E=24 int4 skip_layers=",
    ]


def test_layers_are_looked_for_once_and_measured_on_the_first_engine(opened, tmp_path):
    cfgs = [
        config(tmp_path, draft_weights="int8", layer=24, draft_sample_method=taken)
        for taken in ("greedy", "probabilistic")
    ]
    found = views.run(cfgs, open_engine=opened[0], drop=1)
    assert [engine.cfg.draft_sample_method for engine in opened[1:]] == ["greedy", "probabilistic"]
    assert len(found.steps) == 1 and [one.skip_layers for one in found.rows] == [None, "9", None]


def test_contexts_share_an_engine_and_each_reads_the_keys_and_values_that_it_attends_to(opened, tmp_path, monkeypatch):
    read = {"full": 0.0, "draft": 0.0, "full_kv_token": 2.0, "draft_kv_token": 1.0}
    monkeypatch.setattr(FakeEngine, "call", lambda engine, *_: read)
    work = replace(WORK, input_len=100, output_len=56)
    cfgs = [
        config(tmp_path, draft_weights="shared", layer=12, workload=work, **view)
        for view in ({}, {"draft_context": "window:32"}, {"draft_context": "window:512"})
    ]
    found = views.run(cfgs, open_engine=opened[0])
    assert len(opened) == 2
    assert [one.cost for one in found.rows] == [1 / 2, 32 / 256, 1 / 2]
    assert [one.label for one in found.rows] == ["E=12 shared", "E=12 shared window:32", "E=12 shared window:512"]


def test_gates_make_no_other_view_and_a_view_goes_through_all_layers(tmp_path):
    cfgs = [config(tmp_path, draft_weights="int8"), config(tmp_path, draft_weights="int8", threshold=0.3)]
    (only,) = views.plan(cfgs)
    assert only.layer == 24 and only.threshold is None
    assert [cfg.layer for cfg in views.plan([config(tmp_path)])] == [12]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": Method.baseline}, "views are of method=layer_skip"),
        ({"model": ModelConfig(dtype="half")}, "one model"),
    ],
)
def test_what_cannot_share_an_engine_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        views.plan([config(tmp_path), config(tmp_path, **changes)])


def test_wilsons_interval():
    assert wilson(0, 0) is None
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe 1998, table I
    assert wilson(0, 10)[0] == 0 and wilson(10, 10)[1] == 1
    assert (
        row(
            VerifyCounts(0, 0, 0, [0, 0]),
            model="m",
            E=1,
            draft_weights="int8",
            skip_layers=None,
            fitted=None,
            workload="w",
            temperature=0.0,
            k=2,
        ).first
        is None
    )


def test_the_commands_say_what_was_found(opened, tmp_path):
    words = ["draft_weights=int8,int4", "layer=24", "workload.prompts=random", "k=3", f"results_dir={tmp_path}"]
    shown = call("views", *words, "--drop", "1")
    assert shown.exit_code == 0, shown.output
    assert "E=24 without 9 int8" in shown.stdout and "0.900 (0.880 to 0.917)" in shown.stdout
    assert "not measured" in shown.stdout
    assert len(document(call("views", *words, "--json"))["rows"]) == 2
    planned = document(call("views", *words, "--json", "--dry-run"))
    assert planned["dry_run"] and len(planned["views"]) == 2


def test_copies_are_fitted_on_answers_of_the_model_alone(opened, tmp_path):
    (made,) = fit_weights.run(
        [config(tmp_path, draft_weights="int4")],
        open_engine=opened[0],
        prompts=6,
        out=tmp_path / "c.safetensors",
    )
    engine = opened[1]
    assert engine.cfg.method is Method.baseline and engine.cfg.draft_weights == "shared"
    assert engine.cfg.engine.enforce_eager and engine.asked == [(3, 6, 0.0, 1)]
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


# ---- the search for layers to skip, on functions whose best sets are known


WORTH = {0: 0.9, 1: 0.3, 2: 0.02, 3: 0.05, 4: 0.01, 5: 0.4, 6: 0.07, 7: 0.8}
"""What leaving out a layer costs; together they cost their sum, and two neighbours a little more."""


def agreement(skipped):
    neighbours = sum(1 for layer in skipped if layer + 1 in skipped)
    return max(0.0, 1 - sum(WORTH[layer] for layer in skipped) - 0.04 * neighbours)


def test_each_set_is_the_best_that_grows_out_of_the_one_before():
    steps = list(search(range(8), 4, agreement))
    assert [step.skipped for step in steps] == [(4,), (2, 4), (2, 4, 6), (2, 3, 4, 6)]
    assert [step.agreement for step in steps] == pytest.approx([agreement(step.skipped) for step in steps])
    for step in steps[:3]:  # the small ones are the best of all sets of their size
        best = max(itertools.combinations(range(8), len(step.skipped)), key=agreement)
        assert agreement(best) == pytest.approx(step.agreement)


class Said(Progress):
    def __init__(self):
        self.ends = []

    def ended(self, what, done, total):
        self.ends.append((what, done, total))


def test_few_candidates_are_asked_again():
    asked = []

    def counted(skipped):
        asked.append(skipped)
        return agreement(skipped)

    said = Said()
    steps = list(search(range(8), 4, counted, progress=said))
    assert len(asked) == steps[-1].asked < 8 + 3 * 4
    assert sum(done for _, done, _ in said.ends) == len(asked)  # what was ruled out by its bound is not counted
    assert [total for *_, total in said.ends] == [8, 7, 6, 5]
    assert len(set(asked)) == len(asked)
    assert asked[:8] != sorted(asked[:8])  # the deepest layers come first: they are skipped most easily


def test_a_search_goes_on_from_layers_that_are_skipped_already():
    steps = list(search([0, 1, 2, 3, 5, 6], 2, agreement, start=(4, 7)))
    assert [step.skipped for step in steps] == [(2, 4, 7), (2, 4, 6, 7)]


def test_one_layer_always_stays():
    assert len(list(search(range(3), 9, lambda skipped: 1.0))) == 2
    assert list(search([5], 2, agreement)) == []


def test_an_interrupt_ends_it_between_two_candidates(monkeypatch):
    asked = []
    monkeypatch.setattr(interrupts, "check", lambda: (_ for _ in ()).throw(KeyboardInterrupt) if asked else None)
    with pytest.raises(KeyboardInterrupt):
        list(search(range(8), 4, lambda skipped: asked.append(skipped) or 0.5))
    assert len(asked) == 1
