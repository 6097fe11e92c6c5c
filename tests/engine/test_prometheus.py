"""A real Prometheus scrapes a real server: what drafting did arrives there, every panel of the Grafana dashboard has
data, and the alert rules are evaluated. `make programs` installs it."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import programs
import pytest
from prometheus import prometheus, queries
from served import ENGINE_FORKED, START_SECONDS, metric, served, wait_for

pytestmark = programs.needs("prometheus", "promtool")

CODE = "def read_lines(path):\n"
K, MANY, LONG = 4, 3, 150
SETTINGS = ["layer=3", f"k={K}", "gate=auto", f"length_table={MANY}:0 1@{LONG}:0"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("server"), SETTINGS, **ENGINE_FORKED) as (_, url, _):
        yield url


def test_what_drafting_did_reaches_the_dashboard_and_the_alerts(server, tmp_path):
    with prometheus("prometheus.yml", server, tmp_path) as ask:
        wait_for(lambda: value(ask("up")) == 1, "Prometheus's first look")
        assert metric(server, "selfspec_draft_length") == K
        assert metric(server, "selfspec_draft_cost") > 0
        assert metric(server, "selfspec_draft_rounds_total") == 0  # the series is there before the first request

        tokens = complete(server, CODE, 48)
        assert metric(server, "spec_decode_num_accepted_tokens_total") > 0
        assert off(server, "request") == off(server, "load") == off(server, "context") == 0
        assert complete(server, CODE, 48, vllm_xargs={"selfspec_k": 0}) == tokens
        assert off(server, "request") == 47  # after each of its tokens but the last
        assert off(server, "load") == off(server, "context") == 0

        assert len(complete(server, CODE * 30, 20)) == 20  # some 7 tokens a line
        assert off(server, "context") > 0 == off(server, "load")
        with ThreadPoolExecutor(MANY + 1) as clients:
            list(clients.map(lambda _: complete(server, CODE, 40), range(MANY + 1)))
        assert off(server, "load") > 0
        for seed in range(200):  # what nobody would guess; how soon drafts do not pay is for the clock to say
            complete(server, CODE, 40, temperature=2.0, seed=seed)
            if off(server, "cost") and metric(server, "selfspec_draft_rounds_by_length_total", length="1"):
                break
        assert off(server, "cost") > 0

        drafted = metric(server, "selfspec_draft_tokens_per_pos_total")
        accepted = metric(server, "spec_decode_num_accepted_tokens_total")
        assert 0 < accepted < drafted
        # vLLM counts drafts that were verified; those of a request that has just ended are not.
        assert 0 <= drafted - metric(server, "spec_decode_num_draft_tokens_total") <= 20 * K
        first, second = (metric(server, "selfspec_draft_tokens_per_pos_total", position=str(at)) for at in (0, 1))
        assert first > second > 0
        rounds, steps = metric(server, "selfspec_draft_rounds_total"), metric(server, "selfspec_draft_steps_total")
        by_length = [metric(server, "selfspec_draft_rounds_by_length_total", length=str(n + 1)) for n in range(K)]
        assert sum(by_length) == rounds
        assert sum((n + 1) * count for n, count in enumerate(by_length)) == steps
        assert 0 < metric(server, "selfspec_rounds_ended_by_gate_total") < rounds

        wait_for(lambda: value(ask("sum(vllm:selfspec_draft_rounds_total)")) == rounds, "the last scrape")
        assert value(ask("sum(vllm:selfspec_draft_tokens_per_pos_total)")) == drafted
        asked = queries("selfspec.json")
        assert len(asked) >= 12
        for query in asked:
            wait_for(lambda query=query: answered(ask(query), query), f"no data for {query}")
        assert_rules_are_evaluated(ask)


def assert_rules_are_evaluated(ask: Callable[..., Any]) -> None:
    """All of them, without an error; drafting that is new raises no alarm."""

    def evaluated() -> list[Any]:
        rules = [rule for group in ask(None, "rules")["groups"] for rule in group["rules"]]
        return rules if all(rule["health"] == "ok" for rule in rules) else []

    wait_for(lambda: bool(evaluated()), "rules that are evaluated")
    rules = evaluated()
    assert {rule["type"] for rule in rules} == {"recording", "alerting"}
    assert not [rule["name"] for rule in rules if rule.get("state") == "firing"]
    for rule in rules:
        if rule["type"] == "recording":
            wait_for(lambda rule=rule: answered(ask(rule["name"]), rule["query"]), f"no data for {rule['name']}")


# ---- the server ------------------------------------------------------------------------------------------------------


def complete(url: str, prompt: str, tokens: int, temperature: float = 0, **more: Any) -> list[str]:
    """The tokens of a completion of exactly so many."""
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": temperature, "ignore_eos": True, "logprobs": 0}
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(f"{url}/v1/completions", json={"model": model, **asked, **more}, timeout=START_SECONDS)
    answer.raise_for_status()
    return list(answer.json()["choices"][0]["logprobs"]["tokens"])


def off(url: str, reason: str) -> float:
    return metric(url, "selfspec_rounds_without_drafts_total", reason=reason)


# ---- what Prometheus answers -----------------------------------------------------------------------------------------


def value(answer: Any) -> float | None:
    """Of a query with one series."""
    return float(answer["result"][0]["value"][1]) if len(answer["result"]) == 1 else None


V2_ALONE = ("selfspec_draft_tokens_judged_per_pos_total", "selfspec_steps_by_draft_slots_total")
"""Stay at zero on the V1 runner, which is what a CPU has, so that shares of them are no numbers."""


def answered(answer: Any, query: str) -> bool:
    """Whether a query has data, and all of it is numbers where the V1 runner counts what it asks for."""
    numbers = [float(one["value"][1]) for one in answer["result"]]
    return bool(numbers) and (any(name in query for name in V2_ALONE) or all(map(math.isfinite, numbers)))
