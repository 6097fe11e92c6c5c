"""Measuring one arm: bench and the closed loop of `Engine.generate`, on stand-ins for vLLM; the processor's load."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from bigrams import without_vllm

from selfspec_cli.config.schema import Method, RunConfig, WorkloadConfig
from selfspec_cli.early_exit.counters import DraftCounters, VerifyCounts
from selfspec_cli.engine import cores
from selfspec_cli.engine.live import Engine, Generation
from selfspec_cli.progress import Progress
from selfspec_cli.record.point import output_digests
from selfspec_cli.record.statistics import RequestTimes, itl, quantiles, summary, tpot, ttft
from selfspec_cli.stages import measure

WORK = WorkloadConfig(prompts="random", input_len=4, output_len=6, num_prompts=3, batch=2)


@dataclass
class Core:
    """vLLM's engine core: a prefill gives one token, every later step two, for all requests in flight."""

    steps: int = 0
    running: dict = field(default_factory=dict)
    most: int = 0
    at_step: dict = field(default_factory=dict)

    def add_request(self, name, prompt, params):
        self.running[name] = (params.max_tokens, [])

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        self.steps += 1
        self.most = max(self.most, len(self.running))
        self.at_step.get(self.steps, lambda: None)()
        outputs = []
        for name, (wanted, tokens) in list(self.running.items()):
            tokens += [7] * min(1 if not tokens else 2, wanted - len(tokens))
            if done := len(tokens) == wanted:
                del self.running[name]
            outputs.append(SimpleNamespace(request_id=name, finished=done, outputs=[SimpleNamespace(token_ids=tokens)]))
        return outputs


@pytest.fixture
def live(monkeypatch):
    """An `Engine` on that core, without vLLM; its clock moves by 0.01 s with each step."""
    without_vllm(monkeypatch)
    core = Core()
    monkeypatch.setattr("selfspec_cli.engine.live.time", SimpleNamespace(perf_counter=lambda: core.steps / 100))
    cfg = RunConfig(method=Method.baseline, workload=WORK)
    return Engine(SimpleNamespace(llm_engine=core), cfg, 8, 1.0, 0.0, 0.0), core


def test_every_output_of_a_request_has_its_time(live):
    engine, core = live
    done = engine.generate([[1]] * 3, 6, batch=2)
    assert core.most == 2  # in flight
    assert done.outputs == [[7] * 6] * 3
    first, second, third = done.requests
    assert first == second == RequestTimes(0.0, pytest.approx((0.01, 0.02, 0.03, 0.04)), 6)  # 1, 2, 2, 1 tokens
    assert third.arrival == pytest.approx(0.04)  # when one of the others was done
    assert third.events == pytest.approx((0.05, 0.06, 0.07, 0.08))
    assert (ttft(third), tpot(third), len(itl(third))) == (pytest.approx(0.01), pytest.approx(0.03 / 5), 3)
    assert done.seconds == pytest.approx(0.08)
    assert (done.verified, done.drafting, done.drafted) == (None, None, 0)


def test_a_later_turn_is_made_of_the_answers_and_begins_in_the_place_of_the_turn_before(live):
    engine, core = live
    heard = []

    def later(outputs):
        heard.append([list(output) for output in outputs])
        return [9]

    done = engine.generate([[1], later, later, [2], [3]], 6, batch=2)
    assert heard == [[[7] * 6], [[7] * 6] * 2]
    assert core.most == 2 and done.outputs == [[7] * 6] * 5
    arrivals = [round(100 * one.arrival) for one in done.requests]
    assert arrivals == [0, 4, 8, 0, 4]  # each follows at once what ended in its place
    assert done.steps == [[1, 2, 2, 1]] * 5


def test_an_interrupt_ends_the_loop_between_two_steps(live):
    engine, core = live
    core.at_step[2] = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1]] * 3, 6, batch=2)
    assert core.steps == 2  # the step in hand was finished, and no other begun


def test_what_the_loop_drafted_and_what_was_verified_are_not_mixed_up(monkeypatch, live):
    engine, _ = live
    engine.cfg = RunConfig(workload=WORK)
    counts = iter([VerifyCounts(0, 0, 0, [0]), VerifyCounts(10, 50, 20, [20])])
    own = iter([DraftCounters(5).snapshot(), DraftCounters(5).snapshot() | {"drafted": 30}])
    monkeypatch.setattr(engine, "verify_counts", lambda: next(counts))
    monkeypatch.setattr(engine, "_drafting", lambda: next(own))
    done = engine.generate([[1]] * 3, 6, batch=2)
    assert (done.verified.places, done.drafting["drafted"], done.drafted) == (50, 30, 30)


def config(**more):
    """What is measured in these tests: three repeats, without a warm-up."""
    return RunConfig(**{"workload": WORK, "repeats": 3, "warmup": 0, "perplexity_tokens": 0} | more)


@dataclass
class FakeEngine:
    """Generates at once; remembers what was asked of it."""

    layer = 4
    weights_mib, draft_mib, kv_blocks, max_model_len, vocab_size = 10.0, 1.0, 99, 512, 50
    asked: list = field(default_factory=list)

    def call(self, method):
        self.asked.append(method)
        return {"early_exit_meter_stop": {"sm_util": 0.5}}.get(method)

    def generate(self, prompts, output_len, *, batch, temperature, seed):
        self.asked.append(len(prompts))
        number = self.asked.count(len(prompts))
        times = [RequestTimes(0.0, (0.1, 0.2 * number), output_len) for _ in prompts]
        steps = [[1, output_len - 1]] * len(prompts)
        return Generation([[number] * output_len] * len(prompts), 0.5 * number, times, None, steps=steps)


def test_a_measurement_keeps_every_repeat_and_the_last_outputs(monkeypatch):
    moments = iter([cores.Moment(0, 0, 0), cores.Moment(500, 0, 100), cores.Moment(1500, 100, 700)])
    monkeypatch.setattr(cores, "now", lambda: next(moments))
    engine, seen = FakeEngine(), []

    class Heard(Progress):
        def __call__(self, *words):
            seen.append(words)

        def busy(self, others):
            seen.append(others)

    found = measure.bench(config(warmup=1), engine, Heard())
    assert engine.asked == [3, "early_exit_meter_start", 3, 3, 3, "early_exit_meter_stop", "early_exit_step_bytes"]
    assert [repeat.seconds for repeat in found.repeats] == [1.0, 1.5, 2.0]  # not the one that warmed up
    assert found.tok_s == pytest.approx((18.0, 12.0, 9.0))
    assert found.outputs == output_digests([[4] * 6] * 3)
    assert (found.engine["kv_blocks"], found.engine["layer"], found.engine["sm_util"]) == (99, 4, 0.5)
    assert (found.engine["cpu_own"], found.engine["cpu_others"]) == (0.6, 0.3)
    assert found.perplexity is None
    assert found.seconds > 0
    assert seen == [("warm-up", 1, 1), 0.8, *(("repeats", number, 3) for number in (1, 2, 3))]


def test_a_file_with_categories_is_measured_by_category(tmp_path):
    class Speaking(FakeEngine):
        has_template = False

        def encode(self, text):
            return [*text.encode()]

    rows = [{"turns": ["one", "two"], "category": "b"}, {"turns": ["three"], "category": "a"}]
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = measure.bench(config(workload=replace(WORK, prompts=str(file), num_prompts=2)), Speaking())
    kinds = found.engine["categories"]
    assert {name: one["requests"] for name, one in kinds.items()} == {"a": 3, "b": 6, "all": 9}
    assert kinds["b"]["tok_s"] == pytest.approx([6 / 0.2, 6 / 0.4, 6 / 0.6])
    assert (kinds["a"]["steps"], kinds["a"]["accepted_at"]) == (3, [3, 3, 3, 3])  # five tokens in each second output


def test_plain_decoding_of_several_requests_is_its_own_control():
    class Moody(FakeEngine):
        """Answers with the place of each prompt in what it is asked: a prompt that is asked elsewhere differs."""

        def generate(self, prompts, output_len, *, batch, temperature=0.0, seed=0):
            self.asked.append([prompt if not callable(prompt) else prompt([[7]]) for prompt in prompts])
            outputs = [[place] for place, _ in enumerate(prompts)]
            return Generation(outputs, 1.0, [RequestTimes(0.0, (0.1,), 1)] * len(prompts), None)

    def asked(number=3, **more):
        engine = Moody()
        cfg = config(method=Method.baseline, workload=replace(WORK, num_prompts=number, **more))
        return measure.bench(cfg, engine), [one for one in engine.asked if isinstance(one, list)]

    found, prompts = asked()
    assert len(prompts) == 4 and prompts[3] == prompts[2][::-1]
    assert found.engine["as_itself"] == 1  # the one in the middle
    assert len(found.repeats) == 3
    assert "as_itself" not in asked(batch=1)[0].engine and "as_itself" not in asked(temperature=1.0)[0].engine
    dummy = replace(RunConfig().model, load_format="dummy")
    assert "as_itself" not in measure.bench(config(method=Method.baseline, model=dummy), Moody()).engine
    # Turns of one question stay together.
    later = [[1], lambda outputs: [2], [3]]
    engine = Moody()
    assert measure.as_itself(engine, config(), later, output_digests([[1], [2], [0]])) == 3
    assert engine.asked == [[[3], [1], [2]]]


# ---- how the processes of engines on a GPU start ---------------------------------------------------------------------


PROGRAM = """
import os, sys
import torch
from selfspec_cli.config.schema import EngineConfig, RunConfig
from selfspec_cli.engine.live import fork_engines, how_they_start

torch.rand(2**20).sort()  # in parallel
fork_engines(RunConfig(engine=EngineConfig(device=sys.argv[1])))
print(how_they_start(), flush=True)
if how_they_start() == "fork":
    engine = os.fork()
    if not engine:
        torch.rand(2**20).sort()  # hangs in a fork of a process that has run it in parallel
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.parametrize(("device", "how"), [("cuda", "fork"), ("cpu", "spawn")])
def test_engines_are_forked_where_pytorch_is_kept_to_one_thread_and_do_not_hang(device, how):
    threads = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, device], env=threads, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.split()) == (0, [how]), done.stderr


# ---- how much of the processor a command had, and how much others had ------------------------------------------------


HERTZ = os.sysconf("SC_CLK_TCK")


def machine(proc, stat, processes):
    """A /proc. processes: number -> (parent, user, system, user and system of its children that have ended)."""
    proc.mkdir(exist_ok=True)
    (proc / "stat").write_text(stat)
    for number, (parent, *ticks) in processes.items():
        (proc / str(number)).mkdir(exist_ok=True)
        before = "0 " * 9
        (proc / str(number) / "stat").write_text(
            f"{number} (a) b) R {parent} {before}{' '.join(map(str, ticks))} 20 0\n"
        )


def test_what_neither_this_command_nor_its_children_used_others_had(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "PROC", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2})
    me = os.getpid()
    family = {me: (1, 5, 5, 0, 0), me + 1: (me, 10, 0, 0, 0), me + 2: (me + 1, 20, 0, 0, 0), me + 3: (1, 1000, 0, 0, 0)}
    stat = "cpu 9\ncpu0 10 0 10 70 10 0 0 0 7 7\ncpu1 9 9 9 9 9 9 9 9\ncpu2 100 0 0 0 0 0 0 0\nintr 5\n"
    machine(tmp_path, stat, family)
    before = cores.now()
    assert before == cores.Moment(200, 80, 40)
    # A child ends, and what it used is its parent's. One core has work for 50 ticks, the other for a second.
    shutil.rmtree(tmp_path / str(me + 2))
    stat = f"cpu0 60 0 10 {70 + HERTZ - 50} 10 0 0 0\ncpu1 0\ncpu2 {100 + HERTZ - 30} 0 0 0 0 0 0 30\n"
    machine(tmp_path, stat, {me + 1: (me, 60, 0, 15, 15)})
    own, others = 60, 50 + HERTZ - 60
    expected = {"cpu_own": own / (2 * HERTZ), "cpu_others": others / (2 * HERTZ)}
    assert cores.shares(before, cores.now()) == pytest.approx(expected, abs=0.001)


def test_what_is_not_known_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(cores, "PROC", tmp_path)
    assert cores.now() is None
    some = cores.Moment(0, 0, 0)
    assert cores.shares(None, some) == cores.shares(some, None) == {}
    assert cores.shares(some, cores.Moment(HERTZ // 4, 0, 0)) == {}  # too short
    assert cores.shares(some, cores.Moment(100 * HERTZ, 10 * HERTZ, 91 * HERTZ))["cpu_others"] == 0.0


def test_percentiles_are_over_all_requests():
    requests = [RequestTimes(0.0, (number / 100,), 1) for number in range(1, 101)]
    columns = summary(requests)
    assert (columns["ttft_ms"], columns["ttft_p90_ms"], columns["ttft_p99_ms"]) == pytest.approx((505, 901, 990.1))
    assert quantiles([]) is None
