"""Replay of a trace: its times, lengths and shared blocks, in the forms of Mooncake and BurstGPT."""

import json

import pytest
from commands import call

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import ConfigError, LoadConfig
from selfspec_cli.load_patterns.trace import Request, asked_requests, is_trace
from selfspec_cli.record import tables
from selfspec_cli.record.tables import asked as in_words
from selfspec_cli.stages import load as stage
from selfspec_cli.stages import load_prompts, preflight
from selfspec_cli.stages.load_prompts import of_requests

MOONCAKE = [
    {"timestamp": 27000, "input_length": 700, "output_length": 4, "hash_ids": [0, 1]},
    {"timestamp": 27000, "input_length": 1100, "output_length": 900, "hash_ids": [0, 2, 3]},
    {"timestamp": 27100, "input_length": 20, "output_length": 6, "hash_ids": [4]},
    {"timestamp": 57000, "input_length": 20, "output_length": 2, "hash_ids": [5]},
]
BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.5,,1,ChatGPT,472,18,490,API log
7.0,a,2,GPT-4,30,0,30,Conversation log
9.5,a,2,GPT-4,1087,230,1317,Conversation log
"""


@pytest.fixture
def mooncake(tmp_path):
    file = tmp_path / "conversation_trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in MOONCAKE))
    return str(file)


def times(load):
    return [round(request.at, 6) for request in asked_requests(load)]


def test_both_forms_are_read_and_failed_requests_are_left_out(mooncake, tmp_path):
    first, second, *_ = asked_requests(LoadConfig(trace=mooncake))
    assert (first, second) == (Request(0.0, 700, 4, (0, 1)), Request(0.0, 1100, 900, (0, 2, 3)))
    file = tmp_path / "BurstGPT_3.csv"
    file.write_text(BURSTGPT)
    assert is_trace(str(file)) and is_trace(mooncake)
    assert asked_requests(LoadConfig(trace=str(file))) == [Request(0.0, 472, 18), Request(4.0, 1087, 230)]


def test_a_run_is_limited_by_number_or_time_and_a_rate_keeps_the_proportions(mooncake):
    assert times(LoadConfig(trace=mooncake)) == [0, 0, 0.1]  # of 30 s
    assert times(LoadConfig(trace=mooncake, seconds=31.0)) == [0, 0, 0.1, 30.0]
    assert times(LoadConfig(trace=mooncake, requests=3)) == [0, 0, 0.1]
    assert times(LoadConfig(trace=mooncake, requests=4, rate=0.2)) == [0, 0, 0.05, 15.0]
    assert times(LoadConfig(trace=mooncake, seconds=1.5, rate=2.0)) == [0, 0, 1.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ([MOONCAKE[2], MOONCAKE[0]], "row 2 is earlier than the one before it"),
        ([MOONCAKE[0] | {"output_length": 0}], "no request of this trace has a prompt and an answer"),
        ([MOONCAKE[0] | {"input_length": "many"}], "cannot be read as timestamp, input_length and output_length"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_named(tmp_path, text, said):
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in text))
    with pytest.raises(ConfigError, match=said):
        asked_requests(LoadConfig(trace=str(file)))


def test_other_files_are_no_traces(tmp_path):
    for name, text in (
        ("a.jsonl", '{"prompt": "a"}'),
        ("b.csv", "a,b\n1,2\n"),
        ("c.jsonl", "no json"),
        ("d.jsonl", ""),
    ):
        (tmp_path / name).write_text(text)
        assert not is_trace(str(tmp_path / name))
    assert not is_trace("heldout") and not is_trace(str(tmp_path / "nowhere.jsonl"))


def test_equal_ids_are_equal_blocks_and_lengths_are_the_traces():
    asked = [Request(0, 1300, 1, (7, 8, 9)), Request(0, 700, 1, (7, 3)), Request(0, 600, 1), Request(0, 600, 1)]
    first, second, third, fourth = of_requests(asked, lambda text: [*map(ord, text)], seed=0, most=1200)
    assert [len(one) for one in (first, second, third, fourth)] == [1200, 700, 600, 600]
    assert first[:512] == second[:512] and first[512:700] != second[512:700]
    assert len({tuple(one[:512]) for one in (first, third, fourth)}) == 3
    assert of_requests(asked, lambda text: [*map(ord, text)], seed=0, most=1200)[0] == first


def load_of(*words):
    (cfg,) = compose_runs(None, ["workload=trace", "method=baseline", *words])
    return stage.asked(cfg)


def test_a_trace_is_a_load_of_its_own_name_and_key(mooncake):
    plain, fast = load_of(f"workload.path={mooncake}"), load_of(f"workload.path={mooncake}", "load.rate=2")
    closed = load_of(f"workload.path={mooncake}", "load.clients=2")
    assert (plain.load.kind, fast.load.kind, closed.load.kind) == ("trace", "trace", "closed")
    assert in_words(tables.planned(plain, "key")) == "trace conversation_trace.jsonl"
    assert in_words(tables.planned(fast, "key")) == "trace conversation_trace.jsonl (2 requests/s)"
    assert len({Keys().settings(cfg) for cfg in (plain, fast, closed)}) == 3
    preflight.check_prompts(plain)
    with pytest.raises(ConfigError, match="this is a trace of requests; replay it with selfspec load"):
        preflight.check_prompts(compose_runs(None, ["workload=trace", f"workload.path={mooncake}"])[0])


def test_prompts_are_token_ids_that_fit_the_model(mooncake, monkeypatch):
    class Tokens:
        max_model_len = 1000

        def __init__(self, cfg):
            pass

        def encode(self, text):
            return [*map(ord, text)]

    monkeypatch.setattr(load_prompts, "ModelTokens", Tokens)
    words = [f"workload.path={mooncake}", "workload.output_len=100"]
    found = load_prompts.of_model(load_of(*words, "workload.input_len=900"))
    assert [(len(body["prompt"]), body["max_tokens"]) for body in found.bodies] == [(700, 4), (900, 100), (20, 6)]
    assert (found.cut, found.exact) == (1, False)
    with pytest.raises(ConfigError, match="together they must fit the model's 1000 tokens"):
        load_prompts.of_model(load_of(*words, "workload.input_len=901"))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("load.share=0.5", "load.share=0.5 with the trace"),
        ("load.burst=8", "load.burst=8 with the trace"),
    ],
)
def test_settings_that_contradict_a_trace_are_named(mooncake, tmp_path, word, said):
    words = ["workload=trace", f"workload.path={mooncake}", word, f"results_dir={tmp_path}/r"]
    result = call("load", *words, *(["load.rate=2"] if "burst" in word else []))
    assert result.exit_code == 2 and said in result.stderr
