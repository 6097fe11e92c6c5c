"""`selfspec load` with two tiny servers, as a user runs it: arrivals, a page, and points that hold all of it."""

import csv
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import GATES
from models import LAYERS, save_tiny, save_tokenizer
from served import ENGINE_FORKED, ONE_PROCESS_FEWER

from selfspec_cli.record import folder, tables

# Looked for and not imported: that would replace this process's sockets by gevent's.
pytestmark = pytest.mark.skipif(find_spec("locust") is None, reason="pip install 'selfspec[load]'")

REQUESTS, REPEATS = 12, 2


def test_baseline_and_arm_are_measured_under_the_same_load(tmp_path):
    model = save_tiny("llama", tmp_path / "model")
    save_tokenizer(model)
    prompts = tmp_path / "questions.jsonl"
    rows = [{"prompt": f"{number} " * (3 + number), "category": "odd" if number % 2 else "even"} for number in range(6)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"model.dtype=float32 model.max_model_len=256 layer={LAYERS // 2} k=4 gate=maxp tau={GATES['maxp']}"
    words += " engine.enforce_eager=true engine.max_num_seqs=4 engine.kv_cache_gib=0.0625 workload.num_prompts=6"
    words += " workload.input_len=64 workload.output_len=24"
    words += f" load.share=0.5 load.clients=4 load.requests={REQUESTS} load.repeats={REPEATS}"
    places = [f"model={model}", f"workload.prompts={prompts}", f"results_dir={tmp_path / 'results'}"]
    command = [sys.executable, "-m", "selfspec_cli", "load", *words.split(), *places]
    command += ["load.tpot_limit=100000", "--json", "--", *ONE_PROCESS_FEWER]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | ENGINE_FORKED
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["measured"] == 2 and Path(document["page"]).stat().st_size > 100_000

    points, warnings = folder.read(tmp_path / "results")
    assert not warnings
    found = [tables.row(point) for point in points]
    assert [(row.arm, row.load_share) for row in found] == [("baseline", 0.5), ("layer_skip", 0.5)]
    assert found[0].rate == found[1].rate == 0.5 * points[0].engine["saturation_req_s"]  # the same arrivals
    for point, row in zip(points, found, strict=True):
        assert sum(len(repeat.requests) for repeat in point.repeats) == REQUESTS * REPEATS
        assert (row.failed_requests, row.arrivals) == (0, "poisson")
        assert all(one.tokens == 24 for repeat in point.repeats for one in repeat.requests)
        assert row.goodput == pytest.approx(row.req_s) and row.ttft_p99_ms and row.tpot_p99_ms and row.e2e_p99_ms
        assert row.kv_blocks and point.engine["rss_mib"] and set(point.engine["categories"]) == {"even", "odd", "all"}
        assert point.engine["unlike_answers"] == 0
    for row in found[1:]:
        assert 0 < row.accept_rate < 1 and row.mean_accepted_len > 1
        assert (row.identical, row.outputs) == (6, 6)  # greedy answers are the baseline's
        assert row.speedup and row.speedup_low and row.baseline
    with (tmp_path / "results" / "loads.csv").open() as file:
        assert [line["arrivals"] for line in csv.DictReader(file)] == ["poisson"] * 2
    left = subprocess.run(["pgrep", "-f", str(model)], capture_output=True, text=True, check=False).stdout
    assert not left.strip(), "a server is left over"
