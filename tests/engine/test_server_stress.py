"""A server that is treated badly: clients that vanish, what is no request, a cache that holds few, a kill.

Afterwards its KV blocks are free, its memory is what it was, and every output is what plain decoding gives."""

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness import GATES, greedy, live, tokens
from models import LAYERS, VOCAB
from served import ENGINE_FORKED, NOTHING_COMPILED, ONE_PROCESS_FEWER, metric, wait_for

from selfspec_cli import children
from selfspec_cli.config.compose import compose_runs
from selfspec_cli.engine.server import Server, ServerError, open_server

LIMIT = 384  # tokens of prompt and output together
BLOCKS = 24  # of 32 tokens; a request of the crowd grows to four or five
CROWD, LENGTH = 64, 96
SETTLED_MIB = 16  # what three storms add to resident memory once the allocators have grown; a leak adds it every time
PATIENCE = 300.0  # seconds, for what is waited for and not measured


def prompt(number: int) -> list[int]:
    draw = random.Random(number)
    return [draw.randrange(3, VOCAB) for _ in range(draw.randrange(8, 40))]


PROMPTS = [prompt(number) for number in range(CROWD)]


@pytest.fixture(scope="module")
def plain(talking: Path) -> list[list[int]]:
    """What the model alone says to the crowd's prompts."""
    with live(talking, max_model_len=LIMIT) as engine:
        return tokens(engine.generate(PROMPTS, greedy(LENGTH)))


@pytest.fixture(scope="module")
def start(talking: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts a server, with more environment; each one that it started is ended with the module."""
    words = [f"model={talking}", "model.dtype=float32", f"model.max_model_len={LIMIT}", f"layer={LAYERS // 2}", "k=4"]
    words += ["gate=maxp", f"tau={GATES['maxp']}", "engine.enforce_eager=true", f"engine.max_num_seqs={CROWD}"]
    words += [f"engine.kv_cache_gib={BLOCKS * 2**16 / 2**30}"]
    (cfg,) = compose_runs(None, words)
    folder = tmp_path_factory.mktemp("servers")
    log = folder / "server.log"

    def started(**environment: str) -> Server:
        return stack.enter_context(open_server(cfg, ONE_PROCESS_FEWER, log, folder, NOTHING_COMPILED | environment))

    with ExitStack() as stack:
        yield started


@pytest.fixture(scope="module")
def server(plain: Any, start: Callable[..., Server]) -> Server:
    return start()  # with a spawned engine, as a user's server has it when it is killed


def body(server: Server, ids: list[int], length: int = LENGTH, **more: Any) -> dict[str, Any]:
    return {
        "model": server.model,
        "prompt": ids,
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def complete(server: Server, ids: list[int], length: int = LENGTH) -> list[int]:
    answer = httpx.post(f"{server.url}/v1/completions", json=body(server, ids, length), timeout=PATIENCE)
    assert answer.status_code == 200, answer.text[:300]
    return answer.json()["choices"][0]["token_ids"]


def crowd(server: Server, count: int = CROWD) -> list[list[int]]:
    """The answers to `count` prompts that are asked all at once."""
    with ThreadPoolExecutor(count) as clients:
        return list(clients.map(lambda ids: complete(server, ids), PROMPTS[:count]))


def vanish(server: Server, ids: list[int], parts: int) -> None:
    """A client that reads some parts of a stream and is gone."""
    request = body(server, ids, LIMIT - len(ids), stream=True)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=request, timeout=PATIENCE) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number >= parts:
                return


def at_rest(server: Server) -> None:
    """Nothing runs and nothing waits, and then every block of the KV cache is free."""

    def none(*names: str) -> bool:
        return not any(metric(server.url, name) for name in names)

    wait_for(lambda: none("num_requests_running", "num_requests_waiting"), "the requests of clients that are gone")
    complete(server, PROMPTS[0], 4)  # the gauge of the cache is that of the last step
    wait_for(lambda: none("kv_cache_usage_perc"), "free blocks of requests that have ended")


def test_many_at_once_with_a_cache_that_holds_few(server, plain):
    before = metric(server.url, "num_preemptions_total")
    assert crowd(server) == plain
    assert metric(server.url, "num_preemptions_total") > before
    drafted = metric(server.url, "spec_decode_num_draft_tokens_total")
    assert 0 < metric(server.url, "spec_decode_num_accepted_tokens_total") < drafted
    at_rest(server)


def test_clients_that_vanish_and_what_is_no_request_take_nothing_with_them(server, plain):
    wrong = [{"prompt": [VOCAB + 5]}, {"prompt": [5] * LIMIT}, {"vllm_xargs": {"selfspec_k": 99}}]
    bodies = [b"{", *(json.dumps(body(server, PROMPTS[0]) | change).encode() for change in wrong)]

    def refused(content: bytes) -> int:
        url, headers = f"{server.url}/v1/completions", {"Content-Type": "application/json"}
        answer = httpx.post(url, content=content, headers=headers, timeout=PATIENCE)
        return answer.status_code

    with ThreadPoolExecutor(40) as clients:
        gone = [clients.submit(vanish, server, prompt(2000 + number), number % 5) for number in range(16)]
        stay = [clients.submit(complete, server, ids) for ids in PROMPTS[:16]]
        assert list(clients.map(refused, bodies)) == [400] * len(bodies)
        for one in gone:
            one.result()
        assert [one.result() for one in stay] == plain[:16]
    at_rest(server)


def test_memory_stops_growing(server, plain):
    """Allocators grow by steps, under plain vLLM too, so one step is no leak; what leaks grows with all storms."""

    def storms() -> float:
        for _ in range(3):
            with ThreadPoolExecutor(24) as clients:
                gone = [clients.submit(vanish, server, prompt(3000 + number), 2) for number in range(8)]
                assert list(clients.map(lambda ids: complete(server, ids), PROMPTS[:16])) == plain[:16]
                for one in gone:
                    one.result()
            at_rest(server)
        return server.resident_mib()

    sizes = [storms()]
    for _ in range(6):
        sizes.append(storms())
        if sizes[-1] - sizes[-2] < SETTLED_MIB:
            return
    pytest.fail(f"resident memory grows with every three storms, in MiB: {[round(size) for size in sizes]}")


def test_a_server_that_is_killed_fails_its_clients_and_starts_again(server, plain, start):
    """Last in this file."""
    begun = threading.Event()

    def broken() -> str:
        request = body(server, PROMPTS[1], LIMIT - len(PROMPTS[1]), stream=True)
        try:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=request, timeout=PATIENCE) as answer:
                for line in answer.iter_lines():
                    begun.set()
                    if line == "data: [DONE]":
                        return "whole"
        except httpx.HTTPError as error:
            return type(error).__name__
        return "cut"

    with ThreadPoolExecutor(CROWD) as clients:
        asked = [clients.submit(broken) for _ in range(CROWD)]
        assert begun.wait(PATIENCE)
        os.kill(server.process.pid, signal.SIGKILL)
        ended = [one.result() for one in asked]
    assert set(ended) - {"whole"}, "the kill came too late"
    server.process.wait(PATIENCE)
    with pytest.raises(ServerError, match="exit code -9"):
        server.check()
    children.end(server.process, signal.SIGKILL, 0)  # the engine's process, which may not know yet
    again = start(**ENGINE_FORKED)
    assert crowd(again, 32) == plain[:32]
    at_rest(again)
