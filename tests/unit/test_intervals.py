import pytest

from selfspec_cli.record.intervals import overlap, speedup_interval

BASE = [100.0, 104.0, 96.0, 101.0, 99.0]


def test_the_interval_holds_the_ratio_of_the_medians_and_is_the_same_every_time():
    ours = [150.0, 156.0, 144.0, 151.0, 149.0]
    low, high = speedup_interval(ours, BASE)
    assert low < 1.5 < high
    assert min(ours) / max(BASE) <= low and high <= max(ours) / min(BASE)
    assert speedup_interval(ours, BASE) == (low, high)


def test_both_sides_count():
    steady = [150.0] * 5
    low, high = speedup_interval(steady, BASE)
    assert high - low > 0.02  # the baseline varies
    assert speedup_interval(steady, [100.0] * 5) == (1.5, 1.5)


def test_what_slows_both_sides_of_a_pair_is_no_uncertainty():
    drift = [1.0, 0.5, 0.8, 1.2, 0.6]
    ours, theirs = [150 * d for d in drift], [100 * d for d in drift]
    paired, apart = speedup_interval(ours, theirs, paired=True), speedup_interval(ours, theirs)
    assert paired == pytest.approx((1.5, 1.5))
    assert apart[1] - apart[0] > 0.5


@pytest.mark.parametrize(("ours", "theirs"), [([1.0], BASE), (BASE, [1.0]), (BASE, []), ([], [])])
def test_one_repeat_says_nothing_about_its_spread(ours, theirs):
    assert speedup_interval(ours, theirs) is None


def test_intervals_overlap_where_they_share_a_value():
    assert overlap((1.0, 1.5), (1.5, 2.0)) and overlap((1.0, 3.0), (1.5, 2.0))
    assert not overlap((1.0, 1.4), (1.5, 2.0))
