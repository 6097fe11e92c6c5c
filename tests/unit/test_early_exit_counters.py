from selfspec_cli.early_exit.counters import DraftCounters, made, summary


def rounds_of(*rounds, k=3, counters=None):
    """Counters after rounds given as lists of active requests, one number a step; a round below k ended early."""
    counters = counters or DraftCounters(k)
    for steps in rounds:
        counters.round(steps[0])
        for active in steps:
            counters.step(active)
        if len(steps) < k:
            counters.ended_early()
    return counters


def test_what_is_counted():
    counted = rounds_of([4, 2, 1], [3], [2, 2]).snapshot()
    assert (counted["rounds"], counted["steps"], counted["drafted"], counted["gate_ended"]) == (3, 6, 14, 2)
    assert counted["length_histogram"] == [0, 1, 1, 1]
    assert counted["active_histogram"] == [0, 1, 3, 1, 1]
    assert counted["position_histogram"] == [4 + 3 + 2, 2 + 2, 1]


def test_a_summary_of_counts_from_before_there_were_more_of_them():
    counted = rounds_of([4, 2]).snapshot()
    for name in ("active_histogram", "nan_logits", "seconds"):
        del counted[name]
    summed = summary(counted, rounds=2, drafted=6, accepted=3)
    assert summed["nan_logits"] == 0
    assert summed["active_requests_min"] is summed["active_requests_max"] is summed["draft_seconds"] is None


def test_copied_tokens_are_made_too():
    assert made({"drafted": 6, "free_drafted": 3}) == 9
    assert made({"drafted": 6}) == 6
