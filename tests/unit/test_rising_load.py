"""experiments/gateway/rising_load.py: what is said of the p99 of least_time beside the better backend alone."""

from pathlib import Path

import pytest
from scripts import importable

FOLDER = Path(__file__).parents[2] / "experiments" / "gateway"


@pytest.fixture(scope="module")
def script():
    with importable(FOLDER) as module:
        yield module("rising_load")


def answers(script, seconds, route, failed=""):
    return [script.Answer(2.0, 0.1, one, 8, route, failed) for one in seconds]


def test_the_better_backend_alone_is_what_least_time_is_compared_with(script):
    found = script.document(
        {
            (0, "least_time"): answers(script, [1.0, 2.5], "early"),
            (0, "round_robin"): answers(script, [0.5, 1.0], "plain"),  # a policy, and no backend alone
            (0, "early"): answers(script, [1.0, 2.0], "early"),
            (0, "plain"): answers(script, [1.0, 3.0], "plain"),
        }
    )
    said = "least_time_p99_above_the_better_alone_ms"
    assert found["turns"][0][said] == found["all_turns"][said] == 500.0
    row = found["all_turns"]["kinds"]["least_time"]
    assert (row["requests"], row["by_backend"], row["rates"]["2"]["e2e_p99_ms"]) == (2, {"early": 2}, 2500.0)


def test_a_request_that_failed_is_counted_and_its_time_is_not(script):
    row = script.figures([*answers(script, [1.0], "early"), *answers(script, [9.0], "", "HTTP 503")])
    assert (row["requests"], row["completed"], row["e2e_p99_ms"], row["failed"]) == (2, 1, 1000.0, ["HTTP 503"])
    nothing = script.document(
        {(0, "least_time"): answers(script, [1.0], "early"), (0, "plain"): answers(script, [9.0], "", "HTTP 503")}
    )
    assert nothing["turns"][0]["least_time_p99_above_the_better_alone_ms"] is None
