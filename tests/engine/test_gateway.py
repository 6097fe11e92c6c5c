"""The gateway in front of two vLLM servers of one model, early exit and plain: clients, drafts, a server killed."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from served import ENGINE_FORKED, START_SECONDS, metric, served, wait_for

from selfspec_cli.engine.server import free_port

PROMPTS = ("def read_lines(path):\n", "class Stack:\n", "# grüße, 世界 🙂\nimport os\n", "for index in range(10):\n")


@dataclass
class Both:
    """The gateway's address, the servers' own, and the process of the one with early exit."""

    url: str
    early: str
    plain: str
    process: subprocess.Popen[bytes]
    log: Path
    client: openai.OpenAI

    def complete(self, prompt: str, tokens: int = 48, backend: str | None = None, **more: Any) -> Any:
        wishes = {"selfspec": {"backend": backend} if backend else {}, "ignore_eos": True}
        asked = {"model": "reference", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "extra_body": wishes}
        return self.client.completions.create(**{**asked, **more})

    def row(self, meant: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The newest row of the log that is meant, as soon as it is there."""

        def rows() -> list[dict[str, Any]]:
            whole = [line for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
            return [row for row in map(json.loads, whole) if meant(row)]

        wait_for(lambda: bool(rows()), "a row of the log")
        return rows()[-1]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folders = [tmp_path_factory.mktemp(name) for name in ("early", "plain", "gateway")]
    store = {"shared_storage_path": str(tmp_path_factory.mktemp("storage"))}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": store}
    storage = ["--kv-transfer-config", json.dumps(connector)]
    with (
        served(folders[0], ["layer=3", "k=4", "gate=margin"], storage, **ENGINE_FORKED) as (process, early, _),
        served(folders[1], ["method=baseline"], storage, **ENGINE_FORKED) as (_, plain, _),
        gateway(folders[2], early, plain) as url,
    ):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=START_SECONDS)
        yield Both(url, early, plain, process, folders[2] / "gateway" / "requests.jsonl", client)


@contextmanager
def gateway(folder: Path, early: str, plain: str) -> Iterator[str]:
    """`selfspec gateway` over these servers, once all of its backends take requests."""
    port, file = free_port(), folder / "gateway.yaml"
    backends = [
        {"name": "plain", "kind": "local", "url": plain},
        {"name": "early", "kind": "local", "url": early},
        {"name": "split", "kind": "split", "url": early, "prefill": plain, "weights": "split"},
    ]
    settings = {"port": port, "results_dir": str(folder), "ledger": {"plain_share": 0.0}, "log_text": True}
    file.write_text(json.dumps(settings | {"backends": [{**one, "serves": ["reference"]} for one in backends]}))
    url, log = f"http://127.0.0.1:{port}", folder / "gateway.log"
    with open(log, "wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "selfspec_cli", "gateway", str(file)], stdout=out, stderr=out)
    try:
        wait_for(lambda: len(httpx.get(f"{url}/health").json()["backends"]) == 3, log, process)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_clients_get_the_models_own_text_from_every_backend(both):
    before = metric(both.early, "spec_decode_num_accepted_tokens_total")
    for prompt in PROMPTS:
        texts = {name: both.complete(prompt, backend=name).choices[0].text for name in ("plain", "early")}
        stream = both.complete(prompt, backend="early", stream=True)
        texts["streamed"] = "".join(part.choices[0].text for part in stream)
        texts["routed"] = both.complete(prompt).choices[0].text
        assert set(texts.values()) == {texts["plain"]}
    assert metric(both.early, "spec_decode_num_accepted_tokens_total") > before


def test_what_clients_ask_for_comes_through(both):
    usage = {"stream_options": {"include_usage": True}}
    parts = list(both.complete(PROMPTS[0], 4, "early", logprobs=2, stream=True, **usage))
    assert sum(len(part.choices[0].logprobs.tokens) for part in parts if part.choices) == 4
    assert parts[-1].usage.completion_tokens == 4
    several = both.complete("def ", 8, n=3, seed=1, temperature=1.0)
    assert len({choice.text for choice in several.choices}) > 1
    picked = both.complete("def ", 8, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert picked.choices[0].text in ("yes", "no")
    with pytest.raises(openai.BadRequestError) as refused:
        both.complete(PROMPTS[0], tokens=100_000)  # a prompt of one token ends an engine with the example connector
    assert refused.value.body["backend"] in ("plain", "early", "split")
    with pytest.raises(openai.NotFoundError, match=r"allowed: .*reference"):
        both.client.completions.create(model="nothing", prompt="x")


def test_prefill_on_one_server_and_drafts_on_the_other(both):
    """By vLLM's example connector: the plain server prefills, the other one decodes with early exit."""
    prompt = "".join(f"def function_{number}(argument):\n    return argument + {number}\n\n" for number in range(20))
    names = ("request_prefill_kv_computed_tokens_sum", "spec_decode_num_accepted_tokens_total")
    before = [metric(both.early, name) for name in names]
    prefills = metric(both.plain, "request_success_total")
    split = both.complete(prompt, backend="split")
    computed, accepted = (metric(both.early, name) - old for name, old in zip(names, before, strict=True))
    assert metric(both.plain, "request_success_total") == prefills + 1
    assert accepted > 0
    # On a CPU a block has 128 tokens; those of whole blocks came from the other server.
    assert split.usage.prompt_tokens > 128
    assert 0 <= computed <= split.usage.prompt_tokens - 128
    assert split.choices[0].text == both.complete(prompt, backend="plain").choices[0].text


def test_the_gateway_knows_what_drafts_are_worth(both):
    for _ in range(3):
        for prompt in PROMPTS:
            for name in ("early", "plain"):
                list(both.complete(prompt, backend=name, stream=True))

    def known() -> bool:
        backends = {one["name"]: one for one in httpx.get(f"{both.url}/gateway/routes").json()["backends"]}
        early, plain = backends["early"], backends["plain"]
        return early["round_tokens"] > 1.0 == plain["round_tokens"] and early["round_work"] > 1.0

    wait_for(known, "a look at /metrics")
    assert both.row(lambda row: row["expected_tpot_ms"] and row["tpot_ms"])["expected_tpot_ms"] > 0
    text = httpx.get(f"{both.url}/metrics").text
    assert re.search(r'selfspec_gateway_backend_round_tokens\{backend="early"\} [1-9]', text)


def test_an_answer_survives_the_death_of_its_server(both):
    """The last test: the server with early exit is killed."""
    prompt, tokens = PROMPTS[2], 400
    wanted = both.complete(prompt, tokens, backend="plain").choices[0].text
    text, usage = "", None
    stream = both.complete(prompt, tokens, backend="early", stream=True, stream_options={"include_usage": True})
    for number, part in enumerate(stream):
        text += "".join(choice.text for choice in part.choices)
        if number == 3:
            os.kill(both.process.pid, signal.SIGKILL)
        usage = part.usage
    assert text == wanted
    assert usage.completion_tokens == tokens
    row = both.row(lambda row: row["survived"])
    assert (row["route"], row["survived"], row["tried"]) == ("plain", 1, ["early"])
    assert row["lost_ms"] > 0
    assert both.complete(prompt, tokens).choices[0].text == wanted
