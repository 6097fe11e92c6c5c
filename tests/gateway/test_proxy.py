"""The way of one request: connections, heads, keys and memory, what comes through unchanged, and what is refused."""

import asyncio
import hashlib
import json
import shutil
import ssl
import subprocess
import threading
from contextlib import suppress
from dataclasses import replace

import aiohttp
import pytest
from fake import Fake, answer
from running import ANN, BOB, DIGESTS, ONCE, PROMPT, QUICK, TENANTS, WANTED, running

from selfspec_cli.gateway import control, core, server, supervisor
from selfspec_cli.gateway import request as requests
from selfspec_cli.gateway.settings import CacheSettings, KeySettings, LimitSettings
from selfspec_cli.gateway.supervisor import WARM_TOGETHER
from selfspec_cli.gateway.timing import FEW

PRIORITY = ["--", "--scheduling-policy", "priority"]
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "once"}], "max_tokens": 12}


async def test_answers_come_through_whole_and_in_parts(tmp_path):
    async with running([Fake("a")], tmp_path) as on:
        status, found, headers = await on.post(ONCE)
        assert (status, found["choices"][0]["text"]) == (200, answer("once", 12))
        assert headers["x-selfspec-backend"] == "a"
        assert headers["x-request-id"]
        stream = await on.stream(ONCE)
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
            assert (await on.post(ONCE | {"model": name}))[0] == 200
            assert on.fakes["a"].asked[-1]["model"] == got
        on.gateway.replicas[0].draining = True  # what is left is a backend whose model is set: it has no other
        assert (await on.post(ONCE | {"model": "adapter"}))[0] == 503
        assert (await on.post(ONCE | {"model": "toy"}))[0] == 200


async def test_what_the_gateway_does_not_know_is_handed_on(tmp_path):
    own = {"tools": [{"type": "function"}], "logprobs": 2, "n": 1, "vllm_xargs": {"selfspec_k": 2}, "new_key": [1]}
    own |= {"seed": 2**80 + 1, "logit_bias": {"1": -(2**80)}}
    async with running([Fake("a")], tmp_path) as on:
        await on.post(ONCE | own | {"selfspec": {"class": "interactive"}}, **{"X-Request-Id": "mine-1"})
        assert on.fakes["a"].headers[-1]["x-request-id"] == "mine-1"
        asked = on.fakes["a"].asked[-1]
        assert own.items() <= asked.items()
        assert "selfspec" not in asked
        assert "priority" not in asked


async def test_errors_have_the_form_of_openai_and_name_the_backend(tmp_path):
    async with running([Fake("a", refuse=422)], tmp_path) as on:
        status, found, _ = await on.post(ONCE)
        assert status == 422
        assert found["error"] == {"message": "refused here", "type": "x", "param": None, "code": 422, "backend": "a"}
        assert len(on.fakes["a"].asked) == 1  # nobody else is asked the same
        for body, word in (
            (b"{", "not JSON"),
            (b"[1]", "JSON object"),
            ({"model": "toy"}, "prompt is missing"),
            ({**ONCE, "model": 3}, "model=3"),
            ({**ONCE, "stream": "yes"}, "stream='yes'"),
            ({**ONCE, "n": 0}, "n=0: a whole number from 1 on is needed"),
            ({**ONCE, "n": "2"}, "n='2': a whole number"),
            ({**ONCE, "n": 2.0}, "n=2.0: a whole number"),
            ({**ONCE, "n": True}, "n=True: a whole number"),
            ({**ONCE, "selfspec": {"polic": "x"}}, "did you mean 'policy'"),
            ({**ONCE, "selfspec": {"policy": "round_robbin"}}, "did you mean 'round_robin'"),
            ({**ONCE, "selfspec": {"class": "bulk"}}, "interactive, batch"),
            ({**ONCE, "selfspec": 7}, "JSON object"),
            ({**ONCE, "selfspec": {"backend": "b"}}, "backend 'b' is not known; allowed: a"),
            ({**ONCE, "selfspec": {"priority": "nan"}}, "priority='nan': a whole number is needed"),
            ({**ONCE, "selfspec": {"priority": 1.5}}, "priority=1.5: a whole number"),
            ({**ONCE, "selfspec": {"priority": True}}, "priority=True: a whole number"),
            ({**ONCE, "selfspec": {"deadline_ms": "inf"}}, "deadline_ms='inf': a number from 0 to 86400000"),
            ({**ONCE, "selfspec": {"deadline_ms": -1}}, "deadline_ms=-1: a number from 0"),
            ({**ONCE, "selfspec": {"deadline_ms": "soon"}}, "deadline_ms='soon': a number"),
            ({**ONCE, "stream": True, "stream_options": [1]}, "stream_options=[1]: a JSON object"),
            ({**ONCE, "vllm_xargs": "k=2"}, "vllm_xargs='k=2': a JSON object"),
            (b'{"model": "toy", "prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}", "not JSON"),
        ):
            status, found, _ = await on.post(body)
            assert status == 400, body
            assert word in found["error"]["message"]
        status, found, _ = await on.post(ONCE, **{"X-Selfspec-Polcy": "fixed"})
        assert (status, "did you mean 'policy'" in found["error"]["message"]) == (400, True)
        status, found, _ = await on.post({**ONCE, "model": "tyo"})
        assert (status, found["error"]["code"]) == (404, "model_not_found")
        assert found["error"]["message"] == "model 'tyo' is not known; allowed: toy; did you mean 'toy'?"


async def test_a_model_that_a_backend_may_still_name_is_no_mistake_of_the_client(tmp_path):
    async with running([Fake("a"), Fake("late", model="other", dead=True)], tmp_path) as on:
        status, found, headers = await on.post({**ONCE, "model": "other"})
        assert (status, headers["retry-after"]) == (503, "1")
        assert found["error"]["message"].startswith("model 'other' is not known; allowed: toy")
        assert found["error"]["message"].endswith("; not up yet: late")
        on.fakes["late"].dead = False
        while not on.gateway.replicas[1].sound():
            await asyncio.sleep(0.02)
        assert (await on.post({**ONCE, "model": "other"}))[0] == 200
        status, found, _ = await on.post({**ONCE, "model": "third"})
        assert (status, "not up yet" in found["error"]["message"]) == (404, False)


async def test_a_body_that_is_too_long_is_refused_and_the_next_request_is_answered(tmp_path):
    async with running([Fake("a")], tmp_path, limits=LimitSettings(body_mib=0.01)) as on:
        status, found, _ = await on.post({**ONCE, "prompt": "x" * 200_000})
        assert status == 413
        assert "0.01 MiB" in found["error"]["message"]
        long = {"quality": 1, "entry": "x" * 200_000}
        status, found, _ = await on.post(long, "/gateway/feedback")
        assert (status, "0.0625 MiB" in found["error"]["message"]) == (413, True)
        status, _, _ = await on.post(ONCE)
        assert status == 200


async def test_keys_and_their_limits(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_ANN", "ann's")
    keys = [KeySettings("ann", "KEY_OF_ANN", requests_per_minute=3, admin=True)]
    keys += [KeySettings("bob", DIGESTS["bob"], tokens_per_minute=10)]
    backends = {"a": {"environment": {"HF_TOKEN": "a token"}}}
    async with running([Fake("a")], tmp_path, keys=keys, backends=backends) as on:
        for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": "ann's"}):
            status, found, _ = await on.post(ONCE, **wrong)
            assert (status, found["error"]["type"]) == (401, "authentication_error")
        assert (await on.get("/gateway/routes"))[0] == 401
        assert (await on.get("/health"))[0] == 200
        ann = {"Authorization": "Bearer ann's"}
        looks = [(await on.get(path, **BOB))[0] for path in ("/v1/models", "/gateway/routes", "/gateway/config")]
        assert looks == [200, 403, 403]
        statuses = [(await on.post(ONCE, **ann))[0] for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        found = [await on.post(ONCE, **BOB) for _ in range(2)]
        assert [status for status, *_ in found] == [200, 429]  # the first took 16 tokens
        assert found[1][1]["error"]["type"] == "rate_limit_error" and int(found[1][2]["retry-after"]) > 0
        assert {row["tenant"] for row in await on.rows()} == {"ann", "bob"}
        shown = (await on.get("/gateway/config", **ann))[1]
        assert "HF_TOKEN" in shown and "a token" not in shown and "ann's" not in shown
        assert all("authorization" not in headers for headers in on.fakes["a"].headers)


async def test_wishes_of_a_request(tmp_path):
    async with running([Fake("a"), Fake("b")], tmp_path, backends={"b": {"words": PRIORITY}}) as on:
        _, _, headers = await on.post(ONCE, **{"X-Selfspec-Backend": "b", "X-Selfspec-Priority": "3"})
        assert headers["x-selfspec-backend"] == "b"
        assert on.fakes["b"].asked[-1]["priority"] == 3
        turn = ONCE | {"selfspec": {"policy": "round_robin"}}
        used = [(await on.post(turn))[2]["x-selfspec-backend"] for _ in range(4)]
        assert sorted(used) == ["a", "a", "b", "b"]
        assert [row["reason"] for row in await on.rows()][:2] == ["asked_for", "turn"]


async def test_requests_are_counted_by_their_labels_and_a_drained_backend_is_resumed(tmp_path):
    async with running([Fake("a"), Fake("b")], tmp_path) as on:
        await on.stream(ONCE)
        text = (await on.get("/metrics"))[1]
        (line,) = [line for line in text.splitlines() if line.startswith("selfspec_gateway_requests_total{")]
        assert all(label in line for label in ('class="interactive"', 'reason="first"', 'route="a"', 'status="200"'))
        assert line.endswith(" 1.0")
        for wish, takes, route in (("drain", False, "b"), ("resume", True, "a")):
            assert (await on.post({}, f"/gateway/backends/a/{wish}"))[1]["takes_requests"] is takes
            assert (await on.post(ONCE))[2]["x-selfspec-backend"] == route


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
        assert (await on.post(ONCE))[0] == 200


@pytest.mark.parametrize("text", [True, False])
async def test_the_log_holds_hashes_unless_text_is_wanted(tmp_path, text):
    async with running([Fake("a")], tmp_path, log_text=text) as on:
        await on.post(ONCE)
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


# ---- what comes before a request


@pytest.mark.parametrize("path", ["/v1/completions", "/gateway/feedback", "/nothing"])
async def test_the_key_is_looked_at_before_the_body(tmp_path, path):
    async with running([Fake("a")], tmp_path, keys=TENANTS) as on:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n\r\n"
        assert (await on.talk(head.encode(), 2)).startswith(b"HTTP/1.1 401")
        assert on.gateway.memory.held == 0


async def test_heads_that_are_too_long_or_too_slow_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.3)
    async with running([Fake("a")], tmp_path) as on:
        endless = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(20_000))
        assert (await on.talk(endless)).startswith(b"HTTP/1.1 431")
        assert await on.talk(b"GET /health HTTP/1.1\r\nHo") == b""  # closed, long before five seconds
        assert await on.talk(b"") == b""
        kept = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        assert (await on.talk(kept + kept, 1)).count(b"HTTP/1.1 200") == 2
        assert (await on.stream(PROMPT | {"max_tokens": 300})).text == answer("once upon", 300)


async def test_connections_beyond_the_limit_are_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "most_connections", lambda: 3)
    async with running([Fake("a")], tmp_path) as on:
        open_ones = [await asyncio.open_connection(*on.address) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert (await on.talk(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 503")
        for _, writer in open_ones:
            writer.close()
        found = None
        while found != 200:  # a connection that is refused has no JSON
            with suppress(ValueError):
                found = (await on.post(PROMPT))[0]


async def test_connections_that_idle_are_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.2)
    async with running([Fake("a")], tmp_path) as on:
        kept = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        async with asyncio.timeout(30):
            assert (await on.talk(kept, 3600)).startswith(b"HTTP/1.1 200")


async def test_every_answer_has_a_request_id(tmp_path):
    async with running([Fake("a")], tmp_path, keys=TENANTS, origins=["https://app.example"]) as on:
        page = b"Origin: https://app.example\r\nAccess-Control-Request-Method: POST\r\n"
        for line, more, status in (
            (b"GET /nothing", b"Authorization: Bearer ann\r\n", 404),
            (b"GET /v1/completions", b"Authorization: Bearer ann\r\n", 405),
            (b"GET /v1/models", b"", 401),
            (b"GET /gateway/routes", b"Authorization: Bearer bob\r\n", 403),
            (b"OPTIONS /v1/completions", page, 200),
            (b"POST /health", b"Content-Length: 70000\r\n\r\n" + b"x" * 70_000, 413),  # nobody's, above 64 KiB
            (b"GET /health", b"x: " + b"y" * 100_000 + b"\r\n", 431),
            (b"no HTTP", b"", 400),
        ):
            line += b"" if status == 400 else b" HTTP/1.1"
            found = await on.talk(line + b"\r\nHost: x\r\nConnection: close\r\n" + more + b"\r\n")
            head = found.partition(b"\r\n\r\n")[0].lower()
            assert head.startswith(b"http/1.1 %d" % status), head
            assert head.count(b"x-request-id: ") == 1, head


async def test_a_gateway_that_is_open_to_everybody_says_so(tmp_path):
    for host, keys, warns in (("0.0.0.0", [], True), ("0.0.0.0", TENANTS, False), ("127.0.0.1", [], False)):
        async with running([Fake("a")], tmp_path, host=host, keys=keys) as on:
            assert ("warning: without keys, everybody who reaches 0.0.0.0" in on.said[0]) == warns


async def test_bodies_that_do_not_fit_together_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(core, "BODIES", 2)
    small = replace(QUICK, body_mib=0.1)
    async with running([Fake("a", first=0.5)], tmp_path, limits=small) as on:
        body = PROMPT | {"prompt": "x" * 90_000, "max_tokens": 1}
        found = await asyncio.gather(*(on.post(body) for _ in range(5)))
        assert sorted(status for status, _, _ in found) == [200, 200, 503, 503, 503]
        await on.settled()
        assert on.gateway.memory.held == 0
        assert (await on.post(PROMPT))[0] == 200


async def test_a_long_body_of_token_ids_is_read_in_another_thread_and_streams_go_on(tmp_path, monkeypatch):
    async with running([Fake("a", step=0.01)], tmp_path) as on:
        read, threads = requests.read, []
        monkeypatch.setattr(requests, "read", lambda *given: threads.append(threading.current_thread()) or read(*given))
        long = asyncio.ensure_future(on.post(PROMPT | {"prompt": [5] * 400_000, "max_tokens": 0}))
        assert (await on.stream(PROMPT)).text == WANTED
        assert (await long)[0] == 200
        assert [one is threading.main_thread() for one in threads].count(False) == 1 < len(threads)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Origin": "http://[evil"}, 403),
        ({"Host": "localhost:1"}, 200),
        ({"Origin": "https://app.example"}, 200),
        ({}, 200),
    ],
)
async def test_control_endpoints_answer_no_page_of_others(tmp_path, headers, status):
    async with running([Fake("a")], tmp_path, origins=["https://app.example"]) as on:
        assert (await on.post({}, "/gateway/backends/a/drain", **headers))[0] == status
        assert on.gateway.replicas[0].draining == (status == 200)


async def test_files_are_the_owners_alone(tmp_path):
    async with running([Fake("a")], tmp_path, cache=CacheSettings(mib=1)) as on:
        await on.post(PROMPT)
        await on.rows()
        for file in (tmp_path / "gateway").iterdir():
            assert file.stat().st_mode & 0o077 == 0, file


@pytest.mark.parametrize("body", [b'{"prompt": "SECRET", "model": "SECRET"}', b'{"stream": "SECRET"}', b"SECRET"])
async def test_no_error_in_the_log_quotes_the_request(tmp_path, body):
    async with running([Fake("a", refuse=422)], tmp_path) as on:
        await on.post(body)
        await on.post(PROMPT)
        assert "SECRET" not in json.dumps(await on.rows())


async def test_a_key_has_models_and_money(tmp_path):
    ann = replace(TENANTS[0], models=["toy"], money_per_day=20.0)
    backends = {"a": {"price_out": 1e6, "serves": ["other"]}}
    async with running([Fake("a")], tmp_path, keys=[ann, TENANTS[1]], backends=backends) as on:
        status, found, _ = await on.post(PROMPT | {"model": "other"}, **ANN)
        assert (status, found["error"]["param"]) == (403, "model")
        assert [one["id"] for one in json.loads((await on.get("/v1/models", **ANN))[1])["data"]] == ["toy"]
        statuses = [(await on.post(PROMPT, **ANN))[0] for _ in range(4)]
        assert statuses == [200, 200, 200, 429]  # eight tokens cost eight
        _, found, headers = await on.post(PROMPT, **ANN)
        assert (found["error"]["code"], int(headers["retry-after"]) > 0) == ("insufficient_quota", True)
        assert (await on.post(PROMPT | {"model": "other"}, **BOB))[0] == 200


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_tls_by_a_certificate_and_its_key(tmp_path):
    files = [str(tmp_path / name) for name in ("certificate.pem", "key.pem")]
    words = ["-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-out", files[0], "-keyout", files[1]]
    subprocess.run(["openssl", "req", *words], check=True, capture_output=True)
    async with running([Fake("a")], tmp_path, tls=files) as on:
        url = on.url.replace("http://", "https://") + "/v1/completions"
        trusted = ssl.create_default_context(cafile=files[0])
        trusted.check_hostname = False
        async with on.session.post(url, json=PROMPT, ssl=trusted) as response:
            assert (await response.json())["choices"][0]["text"] == WANTED
        with pytest.raises(aiohttp.ClientError):
            await on.post(PROMPT)
