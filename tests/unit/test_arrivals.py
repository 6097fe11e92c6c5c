"""When requests of an open loop arrive: the process has the rate, the bursts and the spread that it says."""

import statistics
from collections import Counter
from itertools import islice, pairwise

import pytest
from scipy.stats import kstest

from selfspec_cli.stages.arrivals import poisson, schedule


def test_gaps_of_a_poisson_process_are_exponential_with_its_rate():
    moments = list(islice(poisson(4.0, seed=1), 4000))
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert kstest(gaps, "expon", args=(0, 0.25)).pvalue > 0.01
    assert kstest(gaps, "uniform", args=(0, 0.5)).pvalue < 1e-6  # the test can tell


@pytest.mark.parametrize("burst", [1, 8, 64])
def test_bursts_keep_the_mean_rate(burst):
    count = 400 * burst
    moments = list(islice(poisson(5.0, seed=3, burst=burst), count))
    assert set(Counter(moments).values()) == {burst}
    assert count / moments[-1] == pytest.approx(5.0, rel=0.15)
    assert moments == sorted(moments)


def test_the_same_seed_has_the_same_arrivals_and_another_one_has_others():
    assert schedule(3.0, 7, requests=50) == schedule(3.0, 7, requests=50)
    assert schedule(3.0, 7, requests=50) != schedule(3.0, 8, requests=50)


def test_a_schedule_ends_by_number_or_by_time():
    assert len(schedule(10.0, 0, requests=33)) == 33
    by_time = schedule(10.0, 0, seconds=20.0)
    assert by_time[-1] < 20.0
    assert 140 < len(by_time) < 260
    assert by_time == schedule(10.0, 0, requests=len(by_time))


def test_a_short_run_has_at_least_one_burst():
    assert len(schedule(0.001, 0, seconds=0.1, burst=4)) == 4
