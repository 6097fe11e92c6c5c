"""Memory, keys, heads, connections and the control endpoints: what comes before a request."""

import asyncio
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
from running import ANN, BOB, PROMPT, QUICK, TENANTS, WANTED, running

from selfspec_cli.gateway import core, server
from selfspec_cli.gateway import request as requests


async def talk(on, raw, wait=5):
    """What a raw client gets until the connection is closed, or nothing more comes."""
    reader, writer = await asyncio.open_connection(*on.address)
    writer.write(raw)
    found = b""
    try:
        async with asyncio.timeout(wait):
            while part := await reader.read(65536):
                found += part
    except (TimeoutError, ConnectionError):
        pass
    writer.close()
    return found


@pytest.mark.parametrize("path", ["/v1/completions", "/gateway/feedback", "/nothing"])
async def test_the_key_is_looked_at_before_the_body(tmp_path, path):
    async with running([Fake("a")], tmp_path, keys=TENANTS) as on:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n\r\n"
        assert (await talk(on, head.encode(), 2)).startswith(b"HTTP/1.1 401")
        assert on.gateway.memory.held == 0


async def test_heads_that_are_too_large_or_too_slow_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.3)
    async with running([Fake("a")], tmp_path) as on:
        large = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"x-a: " + b"y" * 200_000 + b"\r\n\r\n"
        assert (await talk(on, large)).startswith(b"HTTP/1.1 431")
        endless = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(20_000))
        assert (await talk(on, endless)).startswith(b"HTTP/1.1 431")
        assert await talk(on, b"GET /health HTTP/1.1\r\nHo") == b""  # closed, long before the five seconds of `talk`
        assert await talk(on, b"") == b""
        kept = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        assert (await talk(on, kept + kept, 1)).count(b"HTTP/1.1 200") == 2
        assert (await on.stream(PROMPT | {"max_tokens": 300})).text == answer("once upon", 300)


async def test_connections_beyond_the_limit_are_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "most_connections", lambda: 3)
    async with running([Fake("a")], tmp_path) as on:
        open_ones = [await asyncio.open_connection(*on.address) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert (await talk(on, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")).startswith(b"HTTP/1.1 503")
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
            assert (await talk(on, kept, 3600)).startswith(b"HTTP/1.1 200")


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
            found = await talk(on, line + b"\r\nHost: x\r\nConnection: close\r\n" + more + b"\r\n")
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
    from selfspec_cli.gateway.settings import CacheSettings

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
