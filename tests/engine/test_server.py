"""The server that docs/index.md starts first, asked by the `openai` client in every way that it can."""

import contextlib
import io
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from first_lines import INDEX, README, lines, of_kind, python_blocks
from served import metric, served

openai = pytest.importorskip("openai")
(WORDS,) = [words for words in of_kind("selfspec", README, INDEX) if words[1] == "serve" and "engine=gpu" not in words]

PROMPT = "def read_lines(path):\n"
TOKENS = 48


@dataclass
class Server:
    """The server's process, and a client of it."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    client: Any
    model: str

    def ask(self, **request: Any) -> Any:
        """A completion, or a chat where there are messages; all of its parts where it is streamed."""
        kind = self.client.chat.completions if "messages" in request else self.client.completions
        answer = kind.create(model=self.model, **{"max_tokens": TOKENS, "temperature": 0, **request})
        return list(answer) if request.get("stream") else answer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    template = folder / "chat.jinja"  # the embedded model has none of its own
    template.write_text("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")
    options = ["--chat-template", str(template)]
    of_development = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_SERVER_DEV_MODE": "1"}
    with served(folder, WORDS[2:], options, **of_development) as (process, url, log):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        yield Server(process, url, log, client, client.models.list().data[0].id)


@pytest.fixture(scope="module")
def plain(server: Server) -> str:
    """What the model alone says to PROMPT, greedily: the same server, where one request asks for no drafts."""
    _draft_at_most(server, 0)
    before = metric(server.url, "spec_decode_num_draft_tokens_total")
    text = server.ask(prompt=PROMPT).choices[0].text
    assert metric(server.url, "spec_decode_num_draft_tokens_total") == before
    _draft_at_most(server, 4)
    return str(text)


def _draft_at_most(server: Server, k: int) -> None:
    asked = {"method": "early_exit_set_draft_length", "args": [k]}
    httpx.post(f"{server.url}/collective_rpc", json=asked).raise_for_status()


def test_the_client_of_the_page_is_answered_and_its_metrics_are_there(server, monkeypatch):
    (client,) = [block for block in python_blocks(INDEX) if "OpenAI(" in block]
    (metrics,) = [line for line in lines(INDEX) if line.startswith("curl ")]
    begin = openai.OpenAI.__init__
    at_url = {"base_url": f"{server.url}/v1"}
    monkeypatch.setattr(openai.OpenAI, "__init__", lambda self, **options: begin(self, **options | at_url))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(client, str(INDEX), "exec"), {})
    assert len(out.getvalue()) > 20
    line = metrics.replace("localhost:8000", server.url.removeprefix("http://"))
    shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True).stdout
    assert "spec_decode_num_accepted_tokens_total" in shown and "num_requests_running" in shown
    assert "drafting with layers 0 to 2 of 24" in server.log.read_text(encoding="utf-8")


def test_completions_are_the_models_own_streamed_and_not(server, plain):
    accepted = metric(server.url, "spec_decode_num_accepted_tokens_total")
    whole = server.ask(prompt=PROMPT)
    assert metric(server.url, "spec_decode_num_draft_tokens_total") > 0
    assert metric(server.url, "spec_decode_num_accepted_tokens_total") > accepted
    assert whole.choices[0].text == plain
    assert whole.usage.completion_tokens == TOKENS
    parts = server.ask(prompt=PROMPT, stream=True)
    assert "".join(part.choices[0].text for part in parts) == plain
    assert len(parts) > 1


def test_chats_streamed_and_not(server):
    messages = [{"role": "user", "content": "import os"}]
    whole = server.ask(messages=messages).choices[0].message.content
    parts = server.ask(messages=messages, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
    assert whole


def test_a_request_may_opt_out_of_drafts_and_a_wrong_wish_is_refused(server, plain):
    drafted = metric(server.url, "spec_decode_num_draft_tokens_total")
    found = server.ask(prompt=PROMPT, extra_body={"vllm_xargs": {"selfspec_k": 0}})
    assert found.choices[0].text == plain
    assert metric(server.url, "spec_decode_num_draft_tokens_total") == drafted
    limits = "from 0 (no drafts) to the engine's k, 4"
    for wrong, said in ({"selfspec_k": 5}, limits), ({"selfspec_K": 1}, "did you mean"):
        with pytest.raises(openai.BadRequestError) as error:
            server.ask(prompt=PROMPT, extra_body={"vllm_xargs": wrong})
        assert error.value.status_code == 400
        assert said in str(error.value)
    found = server.ask(prompt=PROMPT, extra_body={"vllm_xargs": {"selfspec_k": 1}})
    assert found.choices[0].text == plain


def test_one_interrupt_ends_the_server(server):
    """Last in this file: the process that was started is vLLM itself, so the signal reaches it."""
    server.process.send_signal(signal.SIGINT)
    server.process.wait(120)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
