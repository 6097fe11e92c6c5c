import os
import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import call, document, done, model_folder, refused, stand_in
from points import baseline, measured

from selfspec_cli.commands.app import app
from selfspec_cli.config.schema import Method
from selfspec_cli.record import columns, folder, quality
from selfspec_cli.record.quality import Finding
from selfspec_cli.record.tracking import Tracker
from selfspec_cli.report import make
from selfspec_cli.stages import fit, ppl, roc, tune
from selfspec_cli.stages.arms import Failure, Found


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    """A folder that looks like a model of eight layers and 64 tokens; the test runs beside it."""
    monkeypatch.chdir(tmp_path)
    folder = model_folder(tmp_path / "model", num_hidden_layers=8, vocab_size=64, max_position_embeddings=1024)
    (tmp_path / "chats.json").write_text("[]")
    (tmp_path / "noise.safetensors").write_bytes(bytes(range(256)))
    return f"model={folder}"


@pytest.fixture
def engines(monkeypatch):
    """Stand-ins for selfspec_cli.engine.live and stages.measure, so that no vLLM is imported; the engines opened."""
    opened = []

    @contextmanager
    def open_engine(cfg):
        print("noise from a library")
        opened.append(cfg)
        yield SimpleNamespace(set_gate=lambda *_: None)

    def bench(cfg, engine, progress):
        if cfg.threshold == 6 and cfg.method is not Method.baseline:
            raise RuntimeError("boom")
        return measured(100.0, 101.0, 99.0)

    def fork_engines(cfg):
        pass

    stand_in(monkeypatch, "selfspec_cli.engine.live", open_engine, fork_engines)
    stand_in(monkeypatch, "selfspec_cli.stages.measure", bench)
    return opened


@pytest.fixture
def fits(monkeypatch):
    """What reaches the stage that fits heads."""
    asked = {}

    def run(cfg, request, **more):
        asked.update(vars(request), path=cfg.model.path, **more)
        head = {"layer": 2, "kind": "lsq", "head": request.heads[1], "vocab": request.vocabularies[-1]}
        return fit.FitResult([head | {"agreement": 0.5, "path": "heads/a"}], 1.0, ["a chat model"])

    stand_in(monkeypatch, "selfspec_cli.stages.fit", run, fit.Request)
    return asked


@pytest.mark.parametrize("command", app.registered_commands, ids=lambda command: command.callback.__name__)
def test_every_command_has_help_with_an_example(command):
    name = command.name or command.callback.__name__
    shown = call(name, "--help").stdout
    assert f"selfspec {name}" in shown.split("Example")[-1]
    assert "--json" in shown and "--debug" in shown
    assert ("--dry-run" in shown) == (name not in ("doctor", "options", "report"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("sweep", "--jsn"), "--json"),
        (("serve", "--jsn"), "did you mean '--json'?"),
        (("serve", "--port", "8123"), "stand behind --, such as: selfspec serve ... -- --port ..."),
        (("load", "--port=8123"), "stand behind --, such as: selfspec load ... -- --port ..."),
        (("sweep", "batch=4"), "did you mean 'workload.batch'"),
        (("sweep", "engine.tensor_parallel_size=2"), "did you mean 'model.tensor_parallel_size'"),
        (("sweep", "gate=entropy", "threshold=-1"), "at least 0"),
        (("roc", "layer=8"), "1..7"),
        (("tune", "layer=8"), "1..7"),
        (("bench", "layer=8"), "1..7"),
        (("bench", "k=1,2"), "selfspec sweep"),
        (("bench", "model=/not/there"), "/not/there"),
        (("bench", "head=lsq", "layer=2"), "selfspec fit-lsq --layer 2"),
        (("bench", "head=lsq", "head.path=gone.safetensors"), "gone.safetensors"),
        (("fit-lsq", "--layer", "8"), "1..7"),
        (("sweep", "workload.input_len=5000", "--dry-run"), "together they must fit the 1024 tokens of model"),
        (("bench", "load.seconds=5", "--dry-run"), "bench has none: selfspec load"),
        (("sweep", "k=99999999"), "k=99999999: out of range; allowed: from 1 to 256, because each draft"),
        (("sweep", "k=2:4"), "'2:4' is no whole number; allowed: a whole number (from 1 to 256), or several as a,b,c"),
        (("sweep", "results_dir=", "--dry-run"), "results_dir=: it must name a folder"),
        (("sweep", "results_dir=model/config.json/x", "--dry-run"), "config.json is a file and not a folder"),
        (("fit-lsq", "--layer", "2", "head_dir=empty.yaml", "--dry-run"), "head_dir=empty.yaml: "),
        (("fit", "head=lsq", "layer=2", "head_dir=empty.yaml", "--dry-run"), "choose another head_dir"),
        (("roc", "layer=2", "head_dir=empty.yaml", "--dry-run"), "choose another head_dir"),
        (("sweep", "head.path=noise.safetensors", "--dry-run"), "truncated or no safetensors file"),
        (("report", "reslts_dir=a"), "did you mean 'results_dir'?"),
        (("doctor", "model=smolm2_135m"), "or ORG/NAME of the Hugging Face Hub; did you mean 'smollm2_135m'?"),
        (("bench", "model=./empty.yaml"), "model.path=./empty.yaml: empty.yaml is a file, not a model's folder"),
        (("fit-lsq", "--layer", "x2"), "'--layer': x2: "),
        (("tune", "--minutes=-7"), "'--minutes': -7: "),
        (("fit", "layer=2"), "is not fitted; name what is"),
        (("fit", "head=lsq", "layer=8"), "1..7"),
        (("fit", "head=lsq"), "layer=null"),
        (("fit", "head=lsq", "layer=2", "vocab=65"), "larger than the vocabulary; must be in 1..64"),
        (("fit", "head=lsq", "layer=2", "vocab=gone.txt"), "a file of token ids"),
        (("fit", "head=lsq", "head.path=a.pt", "layer=2"), "fitted here, not read"),
        (("fit", "head=lsq", "layer=2", "workload.batch=1,2"), "one model, engine and workload"),
        (("fit", "head=lsq", "layer=2", "--corpus", "gone.json", "--dry-run"), "corpus=gone.json"),
        (("fit", "head=lsq", "layer=2", "--corpus", "hf:org/set", "--dry-run"), "corpus=hf:org/set"),
        (("sweep", "head=lens", "layer=2", "vocab=full,65"), "must be in 1..64"),
        (("ppl", "--stride", "512"), "--stride 512: it must be from 1 to the window less 1, 511"),
        (("ppl", "--corpus", "gone.txt"), "there is no such file; allowed: stdlib"),
        (("eval", "--limit", "0"), "--limit"),
        (("bench", "--config", "empty.yaml"), "empty.yaml holds no config; allowed: a config that was dumped as YAML"),
        (("bench", "--config", "no_point.json"), "or the file of a point, results/runs/ID.json"),
        (("serve", "layer=8"), "1..7"),
        (("serve", "k=3,4"), "one point only here"),
        (("serve", "head=lsq", "layer=2"), "selfspec fit-lsq --layer 2"),
        (("verify", "--plant", "kv_slott"), "did you mean 'kv_slot'"),
        (("verify", "--cases", "mixt"), "did you mean 'mixed'"),
        (("verify", "method=skip"), "does not verify its drafts"),
        (("verify", "method=vllm", "speculative=ngram", "--plant", "kv_slot"), "here: accept_one_more, biased_sampler"),
        (("verify", "layer=99"), "1..7"),
        (("verify", "--repeat", "0"), "--repeat"),
        (("load", "load.rate=2", "load.clients=4"), "load.rate=2 and load.clients=4: give one of them"),
        (("load", "load.rate=2", "load.share=0.5"), "load.rate=2 and load.share=0.5: give one of them"),
        (("load", "load.clients=4", "load.burst=8"), "bursts arrive at a rate; give load.rate or load.share"),
        (("load", "load.clients=8", "load.requests=4"), "fewer requests than clients; use load.requests=8 or more"),
        (("load", "load.rate=0"), "load.rate=0.0: out of range; allowed: more than 0"),
        (("load", "load.column=question"), "only the rows of a .json, .jsonl, .parquet file have columns"),
        (("load", "workload.prompts=nowhere.jsonl"), "workload.prompts=nowhere.jsonl: must be"),
        (("load", "load.tpot_limit=-1"), "load.tpot_limit=-1.0: out of range"),
        (("load", "--slo", "ttft_p98=200"), "did you mean 'ttft_p9"),
        (("load", "--slo", "ttft_p99=soon"), "the limit is a number of milliseconds above 0, such as ttft_p99=200"),
        (("load", "--slo", "ttft_p99=200", "load.rate=2"), "--slo with load.rate: it finds the load itself"),
        (("runs", "results_dir=X"), "selfspec runs list results_dir=X"),
        (("runs", "speedup>1.5", "--json"), "selfspec runs list 'speedup>1.5' --json"),
        (("runs", "shwo"), "did you mean 'show'?"),
        (("compare", "a", "b"), "selfspec report --compare a b"),
        (("gate", "FILE"), "selfspec check FILE"),
        (("pull", "model=org/name"), "hf download MODEL"),
        (("doctr",), "did you mean 'doctor'?"),
    ],
)
def test_bad_input_is_a_short_message_and_exit_code_2(words, expected, model):
    Path("empty.yaml").touch()
    Path("no_point.json").write_text('{"model": "x"}')
    alone = words[0] in ("report", "runs", "compare", "gate", "pull", "doctr") or "model" in " ".join(words)
    assert expected in refused(*words, *([] if alone else [model]))


def test_bad_input_ends_in_a_document_with_json_and_in_a_traceback_with_debug():
    error = "repeats=0: out of range; allowed: 3 or more"
    assert document(call("bench", "repeats=0", "--json")) == {"error": error, "exit_code": 2}
    assert "Traceback" in call("bench", "k=0", "--debug").stderr


def test_a_dry_run_names_engines_and_points_and_starts_none(engines, model):
    result = done("sweep", "gate=varH", "tau_v=4,5,6", model, "--dry-run", "--json")
    assert [[point["threshold"] for point in points] for points in document(result)["engines"]] == [[None], [4, 5, 6]]
    text = call("sweep", "gate=varH", "tau_v=4,5,6", model, "--dry-run").stdout
    assert "4 point(s) on 2 engine(s), 0 finished before and skipped; how long it takes is not known" in text
    assert engines == []
    assert not os.path.exists("results")


def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(engines, model, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for more in ([], ["--dry-run"]):
        shown = refused("sweep", model, "results_dir=results", *more)
        assert f"results_dir=results: {tmp_path} cannot be written; choose another" in shown
    assert engines == []


def test_an_engine_for_which_another_vllm_is_installed_is_planned_and_not_started(engines, model, monkeypatch):
    monkeypatch.setattr("selfspec_cli.config.facts.installed_device", lambda: "cpu")
    monkeypatch.setattr("selfspec_cli.stages.preflight.installed_device", lambda: "cpu")
    done("sweep", "engine=gpu", model, "--dry-run")
    shown = refused("sweep", "engine=gpu", model)
    assert "engine=gpu: it runs on cuda, and the vLLM that is installed here is built for cpu" in shown
    assert engines == []


def test_tune_says_beforehand_what_it_will_try(model):
    plan = document(call("tune", model, "--dry-run", "--json", "--minutes", "7"))
    assert {"none", "margin", "varH"} <= set(plan["gates"])
    assert (plan["k"], plan["minutes"]) == ("1 to 12", 7)
    assert plan["exits"] == ["E1-lens", "E2-lens", "E4-lens"]  # copies gain nothing on a CPU
    on_gpu = document(call("tune", model, "engine=gpu", "--dry-run", "--json"))
    assert on_gpu["exits"] == ["E8-lens-int4", "E8-lens-int8", "E1-lens", "E2-lens", "E4-lens"]


def test_tune_tries_copies_over_a_part_of_long_contexts(tmp_path):
    """One more engine, of the copies in the fewest bits, unless it is named what drafts attend to."""
    folder = model_folder(tmp_path / "long", num_hidden_layers=8, max_position_embeddings=65536)

    def plan(*words):
        return document(call("tune", f"model={folder}", "engine=gpu", *words, "--dry-run", "--json"))

    copies, layers = ["E8-lens-int4", "E8-lens-int8"], ["E1-lens", "E2-lens", "E4-lens"]
    assert plan("workload.input_len=8191")["exits"] == [*copies, *layers]
    assert plan("workload.input_len=8192")["exits"] == [copies[0], "E8-lens-int4-blocks1024", copies[1], *layers]
    assert "E8-lens-int4-blocks4096" in plan("workload=long")["exits"]
    for named in ("draft_window=512", "draft_context=full", "draft_context=blocks:2048", "draft_weights=int4"):
        assert not [name for name in plan("workload=long", named)["exits"] if name.endswith("blocks4096")]


def test_what_nobody_reads_in_conf_is_a_warning(engines, model, tmp_path):
    (tmp_path / "conf" / "gaet").mkdir(parents=True)
    warning = call("sweep", model, "--dry-run").stderr
    assert "./conf/gaet/ is not read" in warning and "did you mean 'gate'?" in warning


def test_a_sweep_measures_and_shows_or_ends_in_one_document(engines, model):
    result = done("sweep", "gate=varH", "tau_v=4,5", model)
    assert "3 measured, 0 skipped, 0 failed" in result.stdout
    assert "varH ≤ 4" in result.stdout
    assert "noise" not in result.stdout
    assert len(engines) == 2
    found = document(call("sweep", "gate=varH", "tau_v=4,5", model, "--again", "--json"))
    assert (found["measured"], found["failed"], len(found["rows"])) == (3, 0, 3)
    assert set(columns.header(columns.Summary)) <= set(found["rows"][0])


def test_a_baseline_is_reused_where_that_is_asked_for(engines, model):
    done("sweep", "gate=varH", "tau_v=4", model)
    reused = done("sweep", "gate=varH", "tau_v=4,5", "--again", "--reuse-baseline", model)
    assert "2 measured, 0 skipped" in reused.stdout
    assert "1 baseline(s) of earlier runs reused" in reused.stderr
    assert len(engines) == 3


@pytest.fixture
def sent(monkeypatch):
    """What the tracker is sent: the command, rows, and the first bytes of each picture."""
    reports = []

    class Reports(Tracker):
        def report(self, command, results, rows, pictures):
            self.reported = True
            reports.append((command, rows, {file.read_bytes()[:4] for file in pictures}))

    monkeypatch.setattr("selfspec_cli.commands.measuring.open_tracker", lambda cfg, run_id: nullcontext(Reports()))
    return reports


@pytest.mark.slow
def test_a_tracker_gets_rows_and_figures(engines, model, sent):
    done("sweep", "gate=varH", "tau_v=4", model)
    assert sent == []  # no tracker was asked for
    done("sweep", "gate=varH", "tau_v=5", model, "tracker=wandb")
    ((_, rows, kinds),) = sent
    assert [row.threshold for row in rows] == [None, 5] and kinds == {b"\x89PNG"}


@pytest.mark.parametrize("broken", ["pictures", "report"])
def test_what_a_tracker_cannot_do_is_a_warning(engines, model, monkeypatch, broken):
    def fails(*words):
        raise RuntimeError("no ink")

    tracker = Tracker()
    monkeypatch.setattr(make if broken == "pictures" else tracker, broken, fails)
    monkeypatch.setattr("selfspec_cli.commands.measuring.open_tracker", lambda cfg, run_id: nullcontext(tracker))
    assert "tracker: no ink" in done("sweep", "gate=varH", "tau_v=5", model, "tracker=wandb").stderr


def test_a_plan_is_told_before_the_first_engine_starts_and_in_a_dry_run(engines, model):
    assert "not known" in call("sweep", "gate=varH", "tau_v=4", model).stderr
    result = call("sweep", "gate=varH", "tau_v=5", model)
    assert "2 point(s) on 2 engine(s), 0 finished before and skipped; about" in result.stderr
    plan = call("sweep", "gate=varH", "tau_v=4,5,7", model, "--dry-run", "--json")
    assert document(plan)["expected_seconds"] is not None
    assert [skipped["threshold"] for skipped in document(plan)["skipped"]] == [4, 5]
    assert "varH ≤ 4" in call("sweep", "gate=varH", "tau_v=4,5,7", model, "--dry-run").stdout


@pytest.mark.slow
def test_tables_are_made_again_on_demand(engines, model, tmp_path):
    done("sweep", model, "results_dir=größe")
    table = tmp_path / "größe" / "summary.csv"
    before = table.read_bytes()
    table.write_text("garbage")
    assert document(call("runs", "export", "results_dir=größe", "--json"))["points"] == 2
    assert table.read_bytes() == before
    assert len(document(call("report", "results_dir=größe", "--json"))["rows"]) == 2
    assert "summary.csv is a file and not a folder; choose another --out" in refused(
        "runs", "export", "results_dir=größe", "--out", "größe/summary.csv"
    )


def test_a_disk_that_fills_up_ends_the_command_with_what_to_do(engines, model, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "results/runs/x.part")

    monkeypatch.setattr("selfspec_cli.whole.os.fsync", full)
    result = call("sweep", model)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr and "free some space" in result.stderr
    assert not [name for name in os.listdir("results/runs") if name.endswith(".part")]


def test_the_config_of_a_point_can_be_measured_again(engines, model):
    done("bench", "gate=varH", "tau_v=4", model)
    (arm,) = [point for point in folder.read("results")[0] if point.arm["arm"] == "layer_skip"]
    plan = document(call("bench", "--config", f"results/runs/{arm.id}.json", "--dry-run", "--json"))
    assert plan["engines"][1][0]["key"] == arm.key


def test_a_gate_that_cannot_decide_is_named_and_measured(engines, model):
    for words, fate in ((("gate=maxp", "tau=0"), "never closes"), (("gate=entropy", "threshold=0"), "never opens")):
        result = done("sweep", *words, "layer=4", model, "--json")
        assert fate in result.stderr
        assert fate in document(result)["warnings"][0]
    assert not document(call("sweep", "gate=margin", "threshold=0.2", "layer=4", model, "--json"))["warnings"]


def test_exits_to_look_at_come_from_the_model_where_none_are_named(model):
    assert document(call("roc", model, "--dry-run", "--json"))["layers"] == [2, 4]
    assert document(call("tune", model, "k=3,5", "layer=1,4", "--dry-run", "--json"))["exits"] == ["E1-lens", "E4-lens"]
    assert document(call("roc", model, "layer=3,5", "--dry-run", "--json"))["layers"] == [3, 5]
    result = call("roc", model, "layer=3", "gate=maxp,margin", "--dry-run", "--json")
    assert document(result)["layers"] == [3]
    assert "not looked at: gate=maxp,margin;" in result.stderr


def test_a_failed_point_exits_with_1_and_is_shown(engines, model):
    result = call("sweep", "gate=varH", "tau_v=5,6", model)
    assert result.exit_code == 1
    assert "failed: boom" in result.stdout
    assert "2 measured, 0 skipped, 1 failed" in result.stdout


def test_bench_measures_again_what_is_finished(engines, model):
    done("bench", model)
    done("bench", model)
    assert len(engines) == 4
    assert "0 measured, 1 skipped" in call("sweep", model).stdout


@pytest.mark.parametrize(
    ("words", "heads", "vocabularies"),
    [
        (("fit-lsq", "--layer", "2", "--layer", "4"), ("lens", "lsq"), ("full",)),
        (
            ("fit", "head=lsq_argmax,translator_r15", "layer=2,4", "vocab=full,16"),
            ("lens", "lsq_argmax", "translator_r15"),
            ("full", "16"),
        ),
    ],
)
def test_fits_hand_on_the_grid(fits, model, words, heads, vocabularies):
    more = (*words, "--pairs", "100", "--ridge", "0.01", model)
    result = done(*more, "--corpus", "chats.json")
    assert fits.pop("progress") and fits.pop("open_engine")
    grid = {"layers": (2, 4), "heads": heads, "vocabularies": vocabularies, "path": model.partition("=")[2]}
    assert fits == grid | {"pairs": 100, "ridge": 0.01, "corpus": "chats.json"}
    assert "50.0%" in result.stdout and "warning: a chat model" in result.stderr
    assert f"{heads[1]} 16" in result.stdout or vocabularies == ("full",)
    assert "gone.txt" in refused(*more, "--corpus", "gone.txt")
    assert document(call(*more, "--json"))["reports"][0]["path"] == "heads/a"
    fits.clear()
    plan = document(call(*more, "--json", "--dry-run"))
    assert (plan["layers"], plan["heads"]) == ([2, 4], [*heads])
    assert fits == {}


@pytest.mark.parametrize(
    ("words", "then"),
    [
        (("sweep",), "and the baseline anew unless you add --reuse-baseline"),
        (("sweep", "--again"), "rows measured so far are kept, but the same command begins again"),
        (("bench",), "the same command begins again; selfspec sweep with the same words measures only the rest"),
        (("fit-lsq", "--layer", "2"), "interrupted; the same command begins again"),
        (("fit", "head=lsq", "layer=2"), "interrupted; the same command begins again"),
        (("roc",), "interrupted; the same command begins again"),
        (("tune",), "kept, and the same command goes on from there"),
    ],
)
def test_an_interrupt_exits_with_130_and_says_what_the_same_command_does_then(engines, model, monkeypatch, words, then):
    def bench(*_, **__):
        raise KeyboardInterrupt

    stand_in(monkeypatch, "selfspec_cli.stages.measure", bench)
    for stage in (fit, roc, tune):
        monkeypatch.setattr(stage, "run", bench)
    result = call(*words, model)
    assert result.exit_code == signal.SIGINT + 128, result.output
    assert result.stderr.splitlines()[-1].endswith(then)


def finding(kind, found, **arm):
    named = {"arm": "skip", "E": 4, "head": "lens"} | arm
    return Finding(kind, "a" * 12, "r", "t", "d", named, "b" * 12, {"corpus": "stdlib"}, found)


SCORES = {"nats": [2.0, 4.0], "tokens": [2, 2]}
BASE = {"nats": [2.0, 2.0], "tokens": [2, 2]}
GENERATED = {"scores": SCORES, "baseline": BASE, "identical": 1, "outputs": 2, "drafted": 8, "accepted": 6}
FOUND = [
    finding(quality.TEXT, {"documents": ["a", "b"], "scores": SCORES, "baseline": BASE}),
    finding(quality.GENERATED, {"greedy": GENERATED, "sampled": GENERATED}),
]


@pytest.fixture
def asked(monkeypatch):
    """What reaches the stage, which finds FOUND."""
    words = {}

    def run(cfgs, request, *, open_engine, progress):
        words.update(cfgs=cfgs, request=request)
        print("noise from a library")
        return Found(list(FOUND), words.get("failed", []), words.get("warnings", []))

    monkeypatch.setattr(ppl, "run", run)
    return words


def test_ppl_hands_on_its_words_and_shows_both_perplexities_apart(asked, model):
    result = done("ppl", "method=skip", "layer=2,4", model, "--window", "64", "--stride", "16", "--prompts", "5")
    request = asked["request"]
    assert (request.window, request.stride, request.prompts, request.temperature) == (64, 16, 5, 1.0)
    assert [cfg.layer for cfg in asked["cfgs"]] == [2, 4]
    (line,) = [line for line in result.stdout.splitlines() if "skip E=4" in line]
    assert line.count("4.482 (") == 3 and line.count("+1.763 (") == 3  # exp(6/4), and less exp(1)
    assert "1/2" in line and "75%" in line
    assert "under the plain model" in result.stdout
    assert "noise" not in result.stdout


def test_ppl_ends_with_a_document(asked, model):
    asked["failed"] = [Failure("skip E=4", "out of memory", False)]
    asked["warnings"] = ["no draft was accepted"]
    result = call("ppl", "method=skip", model, "--json")
    assert result.exit_code == 1
    shown = document(result)
    assert shown["findings"][0]["delta_ppl"] == pytest.approx(1.763, abs=1e-3)
    assert shown["findings"][1]["delta_ppl_of_greedy"] == pytest.approx(1.763, abs=1e-3)
    assert shown["failed"] == [{"arm": "skip E=4", "reason": "out of memory", "bad_input": False}]
    assert "no draft was accepted" in result.stderr


def test_ppl_sends_its_findings_to_the_tracker_that_is_asked_for(asked, model, sent):
    """With tracker=wandb it logged nothing."""
    for found in FOUND:
        folder.save_finding("results", replace(found, arm=found.arm | {"model": "m"}))
    assert call("ppl", "method=skip", model).exit_code == 0 and sent == []
    done("ppl", "method=skip", model, "tracker=wandb")
    ((command, (row,), _),) = sent
    assert (command, row.arm, round(row.delta_ppl_of_greedy, 3)) == ("ppl", "skip", 1.763)


@pytest.mark.parametrize("command", ["ppl", "eval"])
def test_a_dry_run_names_the_arms_and_starts_nothing(asked, model, command):
    words = ("gate=varH", "tau_v=4,5", "workload.batch=1,4", model, "--dry-run", "--json")
    shown = document(call(command, *words))
    arm = "layer_skip E=4 k=5 head=lens gate=varH threshold="
    assert shown["arms"] == ["baseline", f"{arm}4.0", f"{arm}5.0"]
    assert asked == {}
    assert "baseline" in call(command, *words[:-1]).stdout


@pytest.mark.slow
def test_help_and_report_load_neither_torch_nor_vllm(tmp_path):
    folder.save(tmp_path / "results", baseline())
    code = (
        "import sys; from selfspec_cli.commands.app import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as done: assert not done.code, done.code\n"
        "assert not {'torch', 'vllm', 'transformers', 'hydra', 'wandb'} & set(sys.modules)\n"
    )
    for words in (["--help"], ["report", "--json"]):
        subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True, cwd=tmp_path)


def test_what_c_libraries_print_stays_out_of_stdout():
    code = (
        "import os, sys; from selfspec_cli.__main__ import reserve_stdout\n"
        "reserve_stdout(); os.write(1, b'noise'); print('result')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert (done.stdout, done.stderr) == (b"result\n", b"noise")
