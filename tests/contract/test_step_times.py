"""What the graphs of an engine take: measured once, kept in a file, and read by a scheduler; no graph is replayed."""

import itertools
import math
from types import SimpleNamespace

import pytest

from selfspec_cli.vllm_plugin.v2 import device_loop, step_times

KV_TOKEN, RATE = 4096.0, 4e12


@pytest.fixture
def engine(configured):
    """Make the configuration of an engine, some arguments of vLLM's and keys of its speculative_config given."""

    def config(max_num_seqs=100, max_model_len=256, cache_dtype="auto", **spec):
        spec = {"method": "layer_skip", "gate": "auto", "num_speculative_tokens": 4, **spec}
        made = configured(spec, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        made.cache_config.cache_dtype = cache_dtype
        return made

    return config


def graph(*what):
    """A graph whose replay says what it is, and how long it takes."""
    return step_times.Replay(lambda: what)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Measures an engine whose graphs take the seconds that they say; and the graphs that were replayed."""
    replayed = []

    def seconds(_, replay):
        replayed.append(replay.launch())
        return replayed[-1][-1]

    monkeypatch.setattr(step_times, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(step_times, "_seconds", seconds)
    monkeypatch.setattr(step_times, "_bytes_per_second", lambda: RATE)

    def measure(config, decodes=(0, 2, 4), drafts=(1, 3, 8, 100), attended=math.inf):
        verify = {
            width: {n: graph("verify", width, n, 1e-3 * n + 1e-4 * width) for n in (1, 3, 8, 100)} for width in decodes
        }
        draft = {n: graph("draft", n, 1e-5 * n) for n in drafts}
        return step_times.measure(config, verify, draft, KV_TOKEN, attended, 0.25)

    return SimpleNamespace(measure=measure, known=step_times.known, replayed=replayed, folder=tmp_path / "step_times")


@pytest.mark.parametrize(("changes", "attended"), [({}, math.inf), ({"draft_window": 64}, 64.0)])
def test_the_graphs_of_batch_sizes_and_of_a_full_engine_are_timed_and_the_scheduler_reads_the_same(
    measured, engine, changes, attended
):
    config = engine(**changes)
    assert measured.known(config) is None
    times = measured.measure(config, attended=attended)
    assert times.verify == {width: {n: 1e-3 * n + 1e-4 * width for n in (1, 8, 100)} for width in (0, 2, 4)}
    assert times.draft == {n: 1e-5 * n for n in (1, 8, 100)}  # 3 is no batch size
    assert (times.kv_token, times.attended, times.measured) == (KV_TOKEN / RATE, attended, True)
    assert times.drafting == 0.25
    assert measured.known(config) == times


def test_what_was_measured_before_is_not_measured_again(measured, engine):
    times = measured.measure(engine())
    count = len(measured.replayed)
    assert measured.measure(engine()) == times and len(measured.replayed) == count
    others = [engine(max_num_seqs=64), engine(num_speculative_tokens=3), engine(draft_weights="int8")]
    others += [engine(max_model_len=128), engine(cache_dtype="fp8")]  # what drafts attend to depends on these
    for number, other in enumerate(others, 2):
        assert measured.known(other) is None
        measured.measure(other)
        assert len(list(measured.folder.iterdir())) == number


def test_an_engine_without_graphs_has_no_times_and_leaves_no_file(measured, engine):
    assert measured.measure(engine(), decodes=()) is None
    assert measured.measure(engine(), decodes=(4,)) is None  # no plain step
    assert measured.measure(engine(), drafts=()) is None
    assert not measured.replayed and not measured.folder.exists()


def test_a_file_that_was_cut_short_counts_as_none(measured, engine):
    measured.measure(engine())
    (file,) = measured.folder.iterdir()
    file.write_text(file.read_text()[:20])
    assert measured.known(engine()) is None
    assert measured.measure(engine()) is not None
    assert measured.known(engine()) is not None


def test_a_graph_that_does_not_end_is_named_and_the_engine_does_not_wait_for_ever(monkeypatch):
    event = SimpleNamespace(record=lambda: None, query=lambda: False)
    monkeypatch.setattr(step_times.torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(device_loop, "PATIENCE", 0.01)
    with pytest.raises(RuntimeError, match=r"a draft step of 48 requests did not end .* SELFSPEC_DEVICE_LOOP=0"):
        step_times._seconds("a draft step of 48 requests", step_times.Replay(lambda: None))


def test_without_layers_that_draft_a_draft_step_takes_no_time(measured, engine):
    decodes = {0: {1: graph("plain", 1e-3)}}
    times = step_times.measure(engine(draft_weights="none", free_drafts=4), decodes, None, KV_TOKEN, math.inf, 0.0)
    assert times is not None and times.draft_step(64) == 0.0


def test_a_graph_is_replayed_on_inputs_of_its_own(monkeypatch):
    """On those of the graph that was captured last, SmolLM2's verify pass of two requests never ended on an H200."""
    done = []
    timed_as(itertools.repeat(1.0), monkeypatch)
    replay = step_times.Replay(lambda: done.append("launch"), lambda: done.append("prepare"))
    assert step_times._seconds("a verify pass", replay) == 1e-3
    assert done == ["prepare"] + ["launch"] * (1 + step_times.REPLAYS)


@pytest.mark.parametrize(
    ("taken", "found", "replays"),
    [
        ([9.0, 8.0, 4.0, 7.0, 4.05, 1.0], 4.0, 5),
        ([9.0, 8.0, 4.0, 7.0, 6.0, 9.0, 3.95, 1.0], 3.95, 7),
        ([1.1**-n for n in range(100)], 1.1 ** -(step_times.MOST_REPLAYS - 1), step_times.MOST_REPLAYS),
    ],
)
def test_replays_that_other_engines_on_the_gpu_delay_are_repeated_until_the_two_shortest_agree(
    taken, found, replays, monkeypatch
):
    times = timed_as(taken, monkeypatch)
    assert step_times._seconds("a draft step", step_times.Replay(lambda: None)) == pytest.approx(found / 1000)
    assert len(taken) - len(list(times)) == replays


def timed_as(milliseconds, monkeypatch):
    """CUDA events between which that many milliseconds pass, in turn; what is left of them."""
    left = iter(milliseconds)
    event = SimpleNamespace(
        record=lambda: None, query=lambda: True, synchronize=lambda: None, elapsed_time=lambda end: next(left)
    )
    monkeypatch.setattr(step_times.torch.cuda, "Event", lambda **_: event)
    return left
