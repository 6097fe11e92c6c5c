"""Where the start of a server goes, by its log."""

import threading
import time

from selfspec_cli.engine import starting

LOG = [
    (9.0, "(APIServer pid=1) INFO 11-22 13:49:04 [utils.py:1] vLLM API server version 0.32.0"),
    (12.5, "(EngineCore pid=2) INFO 11-22 13:49:08 [core.py:133] Initializing a V1 LLM engine (v0.32.0)"),
    (20.0, "(EngineCore pid=2) INFO [model_runner.py:392] Loading model from scratch..."),
    (31.0, "(EngineCore pid=2) INFO [default_loader.py:502] Loading weights took 10.42 seconds"),
    (31.5, "(EngineCore pid=2) INFO [speculator.py:1] early exit: the layers that draft are ready after 0.41 s"),
    (60.0, "(EngineCore pid=2) INFO [monitor.py:48] torch.compile took 27.11 s in total"),
    (64.0, "(EngineCore pid=2) INFO [speculator.py:1] early exit: the layers that draft are compiled after 3.90 s"),
    (66.0, "(EngineCore pid=2) INFO [kv_cache_utils.py:1] GPU KV cache size: 1,000 tokens"),
    (80.0, "Capturing the draft loop:   0%|          | 0/34"),
    (83.0, "(EngineCore pid=2) INFO [speculator.py:1] early exit: the draft loop is captured after 3.00 s, graphs: 34"),
    (84.0, "(EngineCore pid=2) INFO [model_runner.py:1127] Graph capturing finished in 18 secs, took 0.50 GiB"),
    (85.0, "(EngineCore pid=2) INFO [core.py:403] init engine (profile, create kv cache, warmup model) took 51.00 s"),
    (88.0, "(APIServer pid=1) INFO:     Application startup complete."),
]  # fmt: skip


def test_each_phase_has_the_time_since_the_one_before():
    found = starting.phases(LOG)
    assert list(found) == [name for name, _ in starting.MARKS]
    assert found["imports of the API server"] == 9.0
    assert found["weights"] == 11.0
    assert found["graphs of the draft loop"] == 3.0
    assert abs(sum(found.values()) - 88.0) < 1e-9


def test_a_plain_server_has_no_phases_of_early_exit_and_no_time_is_lost():
    found = starting.phases([line for line in LOG if "early exit" not in line[1] and "draft loop" not in line[1]])
    assert not [name for name in found if "draft" in name]
    assert found["the rest of the graphs"] == 84.0 - 66.0
    assert abs(sum(found.values()) - 88.0) < 1e-9
    assert starting.phases([]) == {}


def test_a_growing_log_is_read_with_its_moments(tmp_path):
    log, over = tmp_path / "server.log", threading.Event()

    def write():
        with open(log, "wb", buffering=0) as file:
            file.write(b"first\nhal")
            time.sleep(0.2)
            file.write(b"f\rand more\n")
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    found = starting.follow(log, over.is_set)
    writer.join()
    assert [line for _, line in found] == ["first", "half", "and more"]
    assert found[1][0] - found[0][0] > 0.1
