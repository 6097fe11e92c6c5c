"""The way of one request: what comes through unchanged, and what is refused."""

import asyncio
import hashlib
import json

import pytest
from fake import Fake, answer
from running import BOB, DIGESTS, running

from selfspec_cli.gateway import control, supervisor
from selfspec_cli.gateway.settings import KeySettings, LimitSettings
from selfspec_cli.gateway.supervisor import WARM_TOGETHER
from selfspec_cli.gateway.timing import FEW

PROMPT = {"model": "toy", "prompt": "once", "max_tokens": 12, "temperature": 0}
PRIORITY = ["--", "--scheduling-policy", "priority"]
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "once"}], "max_tokens": 12}


async def test_answers_come_through_whole_and_in_parts(tmp_path):
    async with running([Fake("a")], tmp_path) as on:
        status, found, headers = await on.post(PROMPT)
        assert (status, found["choices"][0]["text"]) == (200, answer("once", 12))
        assert headers["x-selfspec-backend"] == "a"
        assert headers["x-request-id"]
        stream = await on.stream(PROMPT)
        assert stream.text == answer("once", 12)
        assert len(stream.events) == 12  # no usage, which the client has not asked for
        assert "token_ids" not in on.fakes["a"].asked[-2]
        assert on.fakes["a"].asked[-1]["return_token_ids"] is True
        assert all(event["choices"][0]["token_ids"] is None for event in stream.events)
        chat = await on.stream(CHAT | {"stream_options": {"include_usage": True}}, "/v1/chat/completions")
        assert chat.text == answer("once", 12)
        assert chat.events[-1]["usage"]["completion_tokens"] == 12
        assert chat.events[0]["choices"][0]["delta"]["role"] == "assistant"
        status, found, _ = await on.post({"model": "toy", "input": "x"}, "/v1/embeddings")
        assert found["data"][0]["embedding"] == [0.5]
        status, found, _ = await on.post({"model": "toy", "query": "q", "documents": ["d"]}, "/v1/rerank")
        assert (status, found["results"][0]["index"]) == (200, 0)


async def test_of_several_models_of_a_server_a_client_gets_the_one_it_names(tmp_path):
    fakes, backends = [Fake(name, adapters=("adapter",)) for name in "ab"], {"a": {"serves": ["alias"]}}
    async with running(fakes, tmp_path, backends=backends | {"b": {"model": "toy"}}) as on:
        for name, got in (("toy", "toy"), ("adapter", "adapter"), ("alias", "toy"), ("auto", "toy")):
            assert (await on.post(PROMPT | {"model": name}))[0] == 200
            assert on.fakes["a"].asked[-1]["model"] == got
        on.gateway.replicas[0].draining = True  # what is left is a backend whose model is set: it has no other
        assert (await on.post(PROMPT | {"model": "adapter"}))[0] == 503
        assert (await on.post(PROMPT | {"model": "toy"}))[0] == 200


async def test_what_the_gateway_does_not_know_is_handed_on(tmp_path):
    own = {"tools": [{"type": "function"}], "logprobs": 2, "n": 1, "vllm_xargs": {"selfspec_k": 2}, "new_key": [1]}
    own |= {"seed": 2**80 + 1, "logit_bias": {"1": -(2**80)}}
    async with running([Fake("a")], tmp_path) as on:
        await on.post(PROMPT | own | {"selfspec": {"class": "interactive"}}, **{"X-Request-Id": "mine-1"})
        assert on.fakes["a"].headers[-1]["x-request-id"] == "mine-1"
        asked = on.fakes["a"].asked[-1]
        assert own.items() <= asked.items()
        assert "selfspec" not in asked
        assert "priority" not in asked


async def test_errors_have_the_form_of_openai_and_name_the_backend(tmp_path):
    async with running([Fake("a", refuse=422)], tmp_path) as on:
        status, found, _ = await on.post(PROMPT)
        assert status == 422
        assert found["error"] == {"message": "refused here", "type": "x", "param": None, "code": 422, "backend": "a"}
        assert len(on.fakes["a"].asked) == 1  # nobody else is asked the same
        for body, word in (
            (b"{", "not JSON"),
            (b"[1]", "JSON object"),
            ({"model": "toy"}, "prompt is missing"),
            ({**PROMPT, "model": 3}, "model=3"),
            ({**PROMPT, "stream": "yes"}, "stream='yes'"),
            ({**PROMPT, "n": 0}, "n=0: a whole number from 1 on is needed"),
            ({**PROMPT, "n": "2"}, "n='2': a whole number"),
            ({**PROMPT, "n": 2.0}, "n=2.0: a whole number"),
            ({**PROMPT, "n": True}, "n=True: a whole number"),
            ({**PROMPT, "selfspec": {"polic": "x"}}, "did you mean 'policy'"),
            ({**PROMPT, "selfspec": {"policy": "round_robbin"}}, "did you mean 'round_robin'"),
            ({**PROMPT, "selfspec": {"class": "bulk"}}, "interactive, batch"),
            ({**PROMPT, "selfspec": 7}, "JSON object"),
            ({**PROMPT, "selfspec": {"backend": "b"}}, "backend 'b' is not known; allowed: a"),
            ({**PROMPT, "selfspec": {"priority": "nan"}}, "priority='nan': a whole number is needed"),
            ({**PROMPT, "selfspec": {"priority": 1.5}}, "priority=1.5: a whole number"),
            ({**PROMPT, "selfspec": {"priority": True}}, "priority=True: a whole number"),
            ({**PROMPT, "selfspec": {"deadline_ms": "inf"}}, "deadline_ms='inf': a number from 0 to 86400000"),
            ({**PROMPT, "selfspec": {"deadline_ms": -1}}, "deadline_ms=-1: a number from 0"),
            ({**PROMPT, "selfspec": {"deadline_ms": "soon"}}, "deadline_ms='soon': a number"),
            ({**PROMPT, "stream": True, "stream_options": [1]}, "stream_options=[1]: a JSON object"),
            ({**PROMPT, "vllm_xargs": "k=2"}, "vllm_xargs='k=2': a JSON object"),
            (b'{"model": "toy", "prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}", "not JSON"),
        ):
            status, found, _ = await on.post(body)
            assert status == 400, body
            assert word in found["error"]["message"]
        status, found, _ = await on.post(PROMPT, **{"X-Selfspec-Polcy": "fixed"})
        assert (status, "did you mean 'policy'" in found["error"]["message"]) == (400, True)
        status, found, _ = await on.post({**PROMPT, "model": "tyo"})
        assert status == 404
        assert found["error"]["message"] == "model 'tyo' is not known; allowed: toy; did you mean 'toy'?"


async def test_a_model_that_a_backend_may_still_name_is_no_mistake_of_the_client(tmp_path):
    async with running([Fake("a"), Fake("late", model="other", dead=True)], tmp_path) as on:
        status, found, headers = await on.post({**PROMPT, "model": "other"})
        assert (status, headers["retry-after"]) == (503, "1")
        assert found["error"]["message"].startswith("model 'other' is not known; allowed: toy")
        assert found["error"]["message"].endswith("; not up yet: late")
        on.fakes["late"].dead = False
        while not on.gateway.replicas[1].sound():
            await asyncio.sleep(0.02)
        assert (await on.post({**PROMPT, "model": "other"}))[0] == 200
        status, found, _ = await on.post({**PROMPT, "model": "third"})
        assert (status, "not up yet" in found["error"]["message"]) == (404, False)


async def test_a_body_that_is_too_long_is_refused_and_the_next_request_is_answered(tmp_path):
    async with running([Fake("a")], tmp_path, limits=LimitSettings(body_mib=0.01)) as on:
        status, found, _ = await on.post({**PROMPT, "prompt": "x" * 200_000})
        assert status == 413
        assert "0.01 MiB" in found["error"]["message"]
        long = {"quality": 1, "entry": "x" * 200_000}
        status, found, _ = await on.post(long, "/gateway/feedback")
        assert (status, "0.0625 MiB" in found["error"]["message"]) == (413, True)
        status, _, _ = await on.post(PROMPT)
        assert status == 200


async def test_keys_and_their_limits(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_ANN", "ann's")
    keys = [KeySettings("ann", "KEY_OF_ANN", requests_per_minute=3, admin=True)]
    keys += [KeySettings("bob", DIGESTS["bob"], tokens_per_minute=10)]
    backends = {"a": {"environment": {"HF_TOKEN": "a token"}}}
    async with running([Fake("a")], tmp_path, keys=keys, backends=backends) as on:
        for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": "ann's"}):
            status, found, _ = await on.post(PROMPT, **wrong)
            assert (status, found["error"]["type"]) == (401, "authentication_error")
        assert (await on.get("/gateway/routes"))[0] == 401
        assert (await on.get("/health"))[0] == 200
        ann = {"Authorization": "Bearer ann's"}
        looks = [(await on.get(path, **BOB))[0] for path in ("/v1/models", "/gateway/routes", "/gateway/config")]
        assert looks == [200, 403, 403]
        statuses = [(await on.post(PROMPT, **ann))[0] for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        found = [await on.post(PROMPT, **BOB) for _ in range(2)]
        assert [status for status, *_ in found] == [200, 429]  # the first took 16 tokens
        assert found[1][1]["error"]["type"] == "rate_limit_error" and int(found[1][2]["retry-after"]) > 0
        assert {row["tenant"] for row in await on.rows()} == {"ann", "bob"}
        shown = (await on.get("/gateway/config", **ann))[1]
        assert "HF_TOKEN" in shown and "a token" not in shown and "ann's" not in shown
        assert all("authorization" not in headers for headers in on.fakes["a"].headers)


async def test_wishes_of_a_request(tmp_path):
    async with running([Fake("a"), Fake("b")], tmp_path, backends={"b": {"words": PRIORITY}}) as on:
        _, _, headers = await on.post(PROMPT, **{"X-Selfspec-Backend": "b", "X-Selfspec-Priority": "3"})
        assert headers["x-selfspec-backend"] == "b"
        assert on.fakes["b"].asked[-1]["priority"] == 3
        turn = PROMPT | {"selfspec": {"policy": "round_robin"}}
        used = [(await on.post(turn))[2]["x-selfspec-backend"] for _ in range(4)]
        assert sorted(used) == ["a", "a", "b", "b"]
        _, _, headers = await on.post({**PROMPT, "model": "auto"})
        assert headers["x-selfspec-backend"] == "a"
        assert on.fakes["a"].asked[-1]["model"] == "toy"
        assert [row["reason"] for row in await on.rows()][:2] == ["asked_for", "turn"]


async def test_the_control_surface(tmp_path):
    async with running([Fake("a"), Fake("b")], tmp_path) as on:
        await on.stream(PROMPT)
        models = json.loads((await on.get("/v1/models"))[1])
        assert [one["id"] for one in models["data"]] == ["toy"]
        routes = json.loads((await on.get("/gateway/routes"))[1])
        assert [one["state"] for one in routes["backends"]] == ["up", "up"]
        text = (await on.get("/metrics"))[1]
        (line,) = [line for line in text.splitlines() if line.startswith("selfspec_gateway_requests_total{")]
        assert all(label in line for label in ('class="interactive"', 'reason="first"', 'route="a"', 'status="200"'))
        assert line.endswith(" 1.0")
        assert 'selfspec_gateway_backend_up{backend="b"} 1.0' in text
        assert (await on.post({}, "/gateway/backends/a/drain"))[1]["takes_requests"] is False
        _, _, headers = await on.post(PROMPT)
        assert headers["x-selfspec-backend"] == "b"
        assert (await on.post({}, "/gateway/backends/a/resume"))[1]["takes_requests"] is True


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "word", "param"),
    [
        ("GET", "/v1/nothing", None, 404, "there is no GET /v1/nothing here", None),
        ("PUT", "/gateway/routes", None, 405, "allowed: GET", None),
        ("POST", "/gateway/feedback", b'{"quality": 3}', 400, "quality=3: ", "quality"),
        ("POST", "/gateway/feedback", b'{"quality": "high"}', 400, "quality='high': ", "quality"),
        ("POST", "/gateway/feedback", b"{}", 400, "quality: ", "quality"),
        ("POST", "/gateway/feedback", b"{", 400, "JSON", None),
        ("POST", "/gateway/feedback", b"", 400, "body: ", None),
        ("POST", "/gateway/feedback", b'{"request_id": "no", "quality": 1}', 404, "'no' is not known", None),
        ("POST", "/gateway/backends/b/drain", None, 404, "backend 'b' is not known; allowed: a", None),
        ("POST", "/gateway/backends/a/drian", None, 404, "allowed: drain, resume; did you mean 'drain'?", None),
        ("DELETE", "/gateway/cache/1", None, 404, "no cache is configured", None),
        ("GET", "/gateway/config", None, 500, "the gateway failed: RuntimeError", None),
    ],
)
async def test_every_error_of_the_control_surface_has_the_form_of_openai(
    tmp_path, monkeypatch, method, path, body, status, word, param
):
    def broken(settings):
        raise RuntimeError("no settings")

    monkeypatch.setattr(control, "asdict", broken)
    async with running([Fake("a")], tmp_path) as on:
        got, found, headers = await on.post(body or b"", path, method)
        assert (got, headers["content-type"]) == (status, "application/json")
        assert set(found["error"]) == {"message", "type", "param", "code"}
        assert word in found["error"]["message"]
        assert (found["error"]["code"], found["error"]["param"]) == (status, param)
        assert (await on.post(PROMPT))[0] == 200


@pytest.mark.parametrize("text", [True, False])
async def test_the_log_holds_hashes_unless_text_is_wanted(tmp_path, text):
    async with running([Fake("a")], tmp_path, log_text=text) as on:
        await on.post(PROMPT)
        (row,) = await on.rows()
        assert row["prompt"] == ("once" if text else None)
        assert row["sha256"] == hashlib.sha256(b"once").hexdigest()
        assert (row["tokens"], row["prompt_tokens"], row["status"]) == (12, 4, 200)
        assert row["ttft_ms"] is None  # it was no stream
        assert row["e2e_ms"] > 0
        assert row["cost"] is None  # no price is set


class Warmed(Fake):
    """Says in `order` when it is asked, and then takes its time."""

    async def complete(self, request):
        self.order.append(self.name)
        await asyncio.sleep(self.first)
        return await super().complete(request)


@pytest.mark.parametrize(("seconds", "hung"), [(20.0, 0.0), (0.1, 0.3)])
async def test_backends_of_one_host_warm_up_one_after_the_other(tmp_path, monkeypatch, seconds, hung):
    """At once they would slow each other down; but one that hangs is not waited for for long."""
    monkeypatch.setattr(supervisor, "WARM_SECONDS", seconds)
    fakes, order = [Warmed("a", first=hung), Warmed("b", first=hung)], []
    for fake in fakes:
        fake.order = order
    async with running(fakes, tmp_path) as on:
        one_after_the_other = sorted(order) == order or sorted(order, reverse=True) == order
        assert (one_after_the_other, len(order)) == (not hung, 2 * (1 + FEW + 2 * WARM_TOGETHER))
        learnt = [(one.timing.ttft.seen, one.timing.steps.seen) for one in on.gateway.replicas]
        assert learnt == [(FEW, FEW + WARM_TOGETHER)] * 2  # what a token takes alone, and beside others
