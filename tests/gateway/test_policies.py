"""Each policy on a workload made for it, where it beats round robin, and on one where it loses."""

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import pytest
import simulated
from simulated import Server, asked_of, begun, chooser_of, poisson, simulate

from selfspec_cli.gateway.policies.cascade import sureness
from selfspec_cli.gateway.settings import SloSettings
from selfspec_cli.gateway.supervisor import WARM_TOGETHER
from selfspec_cli.gateway.timing import FEW


def plain(count=400, rate=4.0, prompt=100, answer=50, seed=1):
    """Requests without anything in common."""
    return poisson(rate, count, seed, lambda draw, number: (f"{number:08d}", prompt, answer))


def both(policy, servers, requests, slo=None, judge=None, **options):
    """(what the policy reaches, what round robin does) on the same requests."""
    ours = simulate(policy, deepcopy(servers), requests, slo, judge, **options)
    return ours, simulate("round_robin", deepcopy(servers), requests, slo, judge)


def early_exit_and_plain():
    """Early exit is fast alone, and its rounds cost more with every request; the plain server is slower alone."""
    return [Server("early", slope=0.004, work=2.0, drafts=(4, 0.83)), Server("plain", slope=0.0008)]


def test_least_time_wins_where_one_backend_is_faster():
    ours, turn = both("least_time", early_exit_and_plain(), plain(rate=0.3))
    assert ours.mean() < 0.9 * turn.mean()
    assert ours.p99() < turn.p99()
    assert ours.routes["early"] > ours.routes["plain"] > 0  # the slower one is looked at now and then


def warmed(servers):
    """What the requests that warm a backend up have taught (`Supervisor._warm`): its times alone."""
    for one in servers:
        for _ in range(FEW):
            one.replica.timing.learn_ttft(100, 0, 100 / one.engine.rate + one.engine.seconds(1))
        for running in (1,) * FEW + (WARM_TOGETHER,) * WARM_TOGETHER:
            one.replica.learn_tpot(running, one.engine.seconds(running) / one.engine.tokens)
    return servers


def test_no_request_of_a_client_finds_out_that_a_backend_is_slow():
    """One request at a time: the fast backend idles, so all go there; without the warm-up three would not."""
    requests = [(2.0 * number, asked) for number, (_, asked) in enumerate(plain(count=120))]
    ours = simulate("least_time", warmed(early_exit_and_plain()), requests)
    assert ours.routes == {"early": 120, "plain": 0}
    assert ours.p99() <= simulate("fixed", early_exit_and_plain(), requests, backend="early").p99()
    assert simulate("least_time", early_exit_and_plain(), requests).routes["plain"] == FEW


def test_what_drafts_are_worth_is_found_out_by_the_first_requests_of_clients():
    """The text that warms a server up is not theirs, and may be one of which nothing is accepted."""
    early, plain_one = (one.replica for one in warmed(early_exit_and_plain()))
    early.load = replace(early.load, tokens=1.0)
    asked, choose = asked_of("x", 10, 50), chooser_of("least_time").choose
    assert early.predict(asked).e2e > plain_one.predict(asked).e2e
    for _ in range(FEW):
        assert choose(asked, [plain_one, early]).order[0] is early
        early.end(early.begin(asked), None)
    assert choose(asked, [plain_one, early]).order[0] is plain_one


MEASURED = {  # on an H200 (`gateway/three_backends_h200.json` in `gpu.jsonl.xz`)
    "early": ((1, 0.92), (3.3, 1.47), (14.7, 2.15), (35, 2.54)),
    "plain": ((1, 1.9), (4.9, 2.28), (18.9, 2.84), (61, 4.11)),
}
CROSSING = {  # drafts are worth most alone, and cost more than they bring from 20 requests at once on
    "early": ((1, 8.0), (8, 14.0), (32, 40.0), (64, 90.0)),
    "plain": ((1, 20.0), (8, 21.0), (32, 26.0), (64, 34.0)),
}


def seconds(policy, servers, rate, answer, **options):
    """Seconds to the last token, of three times 200 requests; the shortest first."""
    found = []
    for seed in (1, 2, 3):
        requests = plain(rate=rate, count=200, seed=seed, prompt=60, answer=answer)
        found += simulate(policy, servers(), requests, **options).seconds
    return sorted(found)


def pooled(policy, servers, rate, answer, **options):
    """Median and p99 of `seconds`."""
    found = seconds(policy, servers, rate, answer, **options)
    return [found[int(share * len(found))] for share in (0.5, 0.99)]


def curved(curves, kind=Server, **more):
    """The two servers, warmed up; the one that drafts says what its next step will take."""
    points = {name: [(level, ms / 1000) for level, ms in curve] for name, curve in curves.items()}
    return warmed([kind(name, points=curve, says=name == "early", **more) for name, curve in points.items()])


def as_published(*kinds):
    """Servers with the step times of an H200, twice as long."""
    return warmed([Server(kind, engine=simulated.as_published(kind, 2.0), says=kind == "early") for kind in kinds])


@pytest.mark.parametrize(
    ("made", "answer", "rate"),
    [(partial(curved, MEASURED), 128, rate) for rate in (4.0, 16.0, 96.0)]
    + [(partial(curved, CROSSING), 50, rate) for rate in (0.5, 4.0, 8.0, 12.0, 30.0)]
    + [(partial(as_published, "early", "plain"), 32, rate) for rate in (2.0, 15.0, 30.0, 45.0)]
    + [(partial(as_published, "draft_model", "plain"), 32, rate) for rate in (8.0, 15.0, 30.0, 45.0)],
)
def test_at_no_rate_is_least_time_worse_than_the_better_backend_alone(made, answer, rate):
    alone = [pooled("fixed", made, rate, answer, backend=one.name) for one in made()]
    for ours, *others in zip(pooled("least_time", made, rate, answer), *alone, strict=True):
        assert ours <= 1.001 * min(others)


def test_where_the_backend_of_the_shorter_median_has_the_longer_p99_the_mean_is_no_longer():
    """Drafts of a model of their own are 3 % faster on average at 2 requests a second, but some answers take longer."""
    made = partial(as_published, "draft_model", "plain")
    drafts, other = (seconds("fixed", made, 2.0, 32, backend=name) for name in ("draft_model", "plain"))
    assert sum(drafts) < sum(other) and drafts[-6] > other[-6]
    assert sum(seconds("least_time", made, 2.0, 32)) <= sum(drafts)


ON_ONE_CPU = {"early": ((1, 13.0), (4, 18.0), (10, 35.0)), "plain": ((1, 25.0), (4, 27.0), (10, 31.0))}


@dataclass
class Neighbour(Server):
    """A server on the cores of another one: a token takes `slower` times as long while that one is busy."""

    other: Server | None = None
    slower: float = 1.0

    def seconds(self, running):
        return super().seconds(running) * (self.slower if self.other and self.other.engine.jobs else 1.0)


def on_one_host(slower):
    """The two servers of ON_ONE_CPU."""
    pair = curved(ON_ONE_CPU, Neighbour, slower=slower)
    for one, other in (pair, pair[::-1]):
        one.other, one.replica.neighbours = other, [other.replica]
    return pair


@pytest.mark.parametrize(
    ("slower", "rate", "median", "p99"),
    [(1.9, rate, 1.001, 1.001) for rate in (1.0, 2.0)]
    + [(1.9, 4.0, 1.02, 1.4), (1.9, 7.0, 1.02, 1.8), (1.9, 8.0, 1.1, 2.0), (1.9, 14.0, 1.1, 1.5)]  # the other is better
    + [(1.0, 8.0, 0.8, 0.95), (1.0, 14.0, 0.8, 0.95)],  # they share a host and nothing else
)
def test_backends_of_one_host_that_slow_each_other_down_are_used_one_at_a_time(slower, rate, median, p99):
    def made():
        return on_one_host(slower)

    alone = [pooled("fixed", made, rate, 32, backend=name) for name in ON_ONE_CPU]
    ours = [one / min(others) for one, *others in zip(pooled("least_time", made, rate, 32), *alone, strict=True)]
    assert ours[0] <= median and ours[1] <= p99


def test_least_time_loses_where_times_have_another_reason():
    """Each backend has a neighbour that takes turns with the other's: what was learnt is always a little old."""
    servers = [Server("a", extra=lambda at: 0.05 * (at % 2 < 1)), Server("b", extra=lambda at: 0.05 * (at % 2 >= 1))]
    ours, turn = both("least_time", servers, plain(rate=4.0, answer=40))
    assert ours.mean() > turn.mean()


def test_the_cheapest_within_the_limits_costs_less_and_keeps_them():
    dear = Server("dear", step=0.01, settings={"price_out": 10.0})
    cheap = Server("cheap", step=0.03, slope=0.004, settings={"price_out": 1.0})
    requests = plain(rate=2.5, count=500)
    slo = SloSettings(ttft_ms=1000, tpot_ms=60)
    ours, turn = both("cheapest_within_slo", [dear, cheap], requests, slo)
    assert ours.cost < 0.8 * turn.cost
    late = sum(one > 60 * 0.060 for one in ours.seconds)
    assert late <= 0.05 * len(ours.seconds)
    assert ours.routes["dear"] > 0  # when the cheap one could not have kept the limit
    assert ours.mean() > turn.mean()  # where it loses: it is slower for less money


def test_sticky_wins_where_prompts_begin_alike():
    """Twelve long documents, each asked about many times: a backend that has seen one prefills its end alone."""

    def ask(draw, number):
        return (f"document {draw.randrange(12):03d} " * 40 + f"{number:08d}", 3000, 20)

    servers = [Server(name, rate=4000.0) for name in "abc"]
    requests = poisson(2.5, 300, 3, ask)
    ours, turn = both("sticky_until_saturated", servers, requests, SloSettings(ttft_ms=2000))
    assert sum(ours.ttft) < 0.7 * sum(turn.ttft)


def test_a_session_stays_where_it_was_until_that_is_saturated():
    """Prompts have nothing in common, so that only the session's name can tell."""
    choose = chooser_of("sticky_until_saturated", SloSettings(ttft_ms=1000)).choose
    replicas = [Server(name).replica for name in "abc"]
    asked = [asked_of(f"{number:08d}", 1000, 5) for number in range(60)]
    where = {}
    for number, one in enumerate(asked):
        one.session, one.tenant = f"s{number % 6}", "ann"
        replica = choose(one, replicas).order[0]
        where.setdefault(one.session, set()).add(replica.name)
        flight = begun(replica, one, 0.2)  # 5000 tokens a second
        if number % 6 < 3:  # others go on, so that a session that forgot its place would move
            replica.end(flight, None)
    assert all(len(names) == 1 for names in where.values()) and len({name for (name,) in where.values()}) > 1
    home = next(one for one in replicas if one.name in where["s0"])
    for number in range(8):
        home.begin(asked_of(f"{number} others", 1000, 5))
    assert choose(asked[0], replicas).order[0] is not home
    asked[0].tenant = "bob"  # another's session of the same name
    assert choose(asked[0], replicas).reason != "session"


def test_sticky_loses_where_answers_are_long_and_nothing_is_alike():
    """Two conversations alternate; the beginning that they share keeps them on one backend."""
    requests = poisson(6.0, 300, 4, lambda draw, number: ("system prompt of all " * 4 + f"{number:08d}", 40, 120))
    servers = [Server(name, slope=0.002) for name in "ab"]
    ours, turn = both("sticky_until_saturated", servers, requests)
    assert ours.mean() > turn.mean()


HARD = "prove that the integral of this function converges "


def test_quality_sends_what_the_small_model_can_do_to_the_small_model():
    def ask(draw, number):
        hard = draw.random() < 0.5
        text = HARD if hard else "what is the colour of the sky on day "
        return (f"{text}{number}", 30, 30)

    def judge(name, prompt):
        return 1.0 if name == "large" or not prompt.startswith(HARD) else 0.0

    servers = [Server("small", settings={"price_out": 1.0}), Server("large", settings={"price_out": 10.0})]
    requests = poisson(3.0, 400, 5, ask)
    ours, turn = both("quality", servers, requests, judge=judge)
    assert ours.quality > 0.95 > turn.quality
    assert ours.cost < 1.2 * turn.cost
    assert ours.routes["small"] > 0.4 * 400


def test_quality_loses_where_nobody_judges():
    requests = plain(rate=8.0)
    servers = [Server("small", slope=0.004, settings={"price_out": 1.0}), Server("large", settings={"price_out": 9.0})]
    ours, turn = both("quality", servers, requests)
    assert ours.routes["large"] == 0
    assert ours.mean() > turn.mean()


def cascade_of(**more):
    """What a cascade of a large and a small model chooses for a request."""
    servers = [Server("large", settings={"price_out": 10.0}), Server("small", settings={"price_out": 1.0})]
    asked = asked_of("x", 10, 10)
    asked.body |= more
    return chooser_of("cascade").choose(asked, [one.replica for one in servers])


def test_a_cascade_wins_where_the_small_model_knows_what_it_does_not_know_and_loses_elsewhere():
    """It loses by wrong answers of which the small model is sure to 0.9: the large one is not asked."""
    choice = cascade_of()
    assert [one.name for one in choice.order] == ["small", "large"]
    assert 0.3 < choice.sure < 0.9


@pytest.mark.parametrize("more", [{"n": 2}, {"prompt": ["x", "y"]}, {"stream": True}, {"tools": [{}]}])
def test_a_cascade_asks_the_dearest_where_no_single_whole_text_is_wanted(more):
    choice = cascade_of(**more)
    assert (choice.order[0].name, choice.reason) == ("large", "dearest")


def test_how_sure_an_answer_is():
    logs = {"token_logprobs": [None, -1.0, -1.0]}
    assert sureness({"choices": [{"logprobs": logs}]}) == pytest.approx(0.3679, abs=1e-3)
    assert sureness({"choices": [{"logprobs": {"content": [{"logprob": 0.0}]}}]}) == 1.0
    for strange in ({}, {"choices": []}, {"choices": [{}]}, {"choices": [{"logprobs": {"content": [{}]}}]}, [], None):
        assert sureness(strange) is None
