"""The page of a sweep that is watched: made again as often as it may cost, and one that ends with the sweep."""

import subprocess

import pytest
from commands import call
from points import against, baseline

from selfspec_cli.commands.live_page import RELOAD, SHARE, LivePage
from selfspec_cli.record import folder


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def watched(tmp_path, takes):
    """A page that takes so many seconds, its clock, and the words that it was made with."""
    clock, made = Clock(), []

    def make(words):
        made.append(list(words))
        clock.now += takes

    return LivePage(tmp_path, clock, make), clock, made


def test_pages_take_a_small_share_of_a_long_sweep(tmp_path):
    page, clock, made = watched(tmp_path, takes=30.0)
    for _ in range(10_000):
        clock.now += 2.0
        page.measured()
    measuring = 10_000 * 2.0
    assert 1 < len(made) and page.spent <= 30.0 + SHARE * (measuring + page.spent)


def test_the_first_point_makes_a_page_and_the_end_one_that_does_not_reload(tmp_path):
    page, clock, made = watched(tmp_path, takes=0.001)
    page.close()
    assert made == []  # nothing was measured, so there is nothing to show
    for _ in range(3):
        clock.now += 60
        page.measured()
    page.close()
    assert [("--reload" in words) for words in made] == [True, True, True, False]
    assert all(words[0] == f"results_dir={tmp_path}" for words in made)
    assert made[0][-1] == str(RELOAD)


def test_a_page_that_cannot_be_made_is_told_once_and_not_tried_again(tmp_path):
    tried = []

    def make(words):
        tried.append(words)
        raise subprocess.CalledProcessError(1, "selfspec report")

    page = LivePage(tmp_path, Clock(), make)
    page.measured()
    page.measured()
    page.close()
    assert len(tried) == 1 and page.error is not None and "selfspec report" in page.error


@pytest.mark.slow
def test_only_a_page_of_a_running_sweep_says_that_it_reloads(tmp_path):
    base = baseline()
    for point in (base, against(base)):
        folder.save(tmp_path, point)
    text = {}
    for name, words in {"watched": ["--reload", "10"], "last": []}.items():
        assert call("report", f"results_dir={tmp_path}", "--json", *words).exit_code == 0
        text[name] = (tmp_path / "report.html").read_text()
    assert 'id="watched"' in text["watched"] and 'data-seconds="10"' in text["watched"]
    assert 'id="watched"' not in text["last"]
