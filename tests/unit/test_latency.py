import pytest

from selfspec_cli.record.latency import RequestTimes, end_to_end, itl, quantiles, summary, tpot, ttft

# Seven tokens in four outputs: the second output brought three tokens, the third two.
DRAFTED = RequestTimes(arrival=1.0, events=(1.5, 1.6, 1.8, 1.9), tokens=7)


def test_the_definitions_are_those_of_vllms_benchmark():
    assert ttft(DRAFTED) == pytest.approx(0.5)
    assert end_to_end(DRAFTED) == pytest.approx(0.9)
    assert tpot(DRAFTED) == pytest.approx((0.9 - 0.5) / 6)  # a token
    assert itl(DRAFTED) == pytest.approx([0.1, 0.2, 0.1])  # an output: longer than a token where drafts are accepted


def test_one_token_has_neither_tpot_nor_itl():
    alone = RequestTimes(0.0, (0.25,), 1)
    assert (tpot(alone), itl(alone)) == (None, [])
    assert summary([alone]) == {
        "ttft_ms": 250,
        "ttft_p90_ms": 250,
        "ttft_p99_ms": 250,
        "e2e_ms": 250,
        "e2e_p90_ms": 250,
        "e2e_p99_ms": 250,
    }


def test_percentiles_are_over_all_requests():
    requests = [RequestTimes(0.0, (number / 100,), 1) for number in range(1, 101)]
    columns = summary(requests)
    assert (columns["ttft_ms"], columns["ttft_p90_ms"], columns["ttft_p99_ms"]) == pytest.approx((505, 901, 990.1))
    assert quantiles([]) is None
