"""The commands of README.md and docs/index.md that a CPU can run are run; only what is measured is shortened."""

from __future__ import annotations

import contextlib
import io
import subprocess
from pathlib import Path

import pytest
from first_lines import INDEX, README, lines, of_kind, python_blocks
from served import served
from typer.testing import CliRunner

from selfspec_cli.commands.app import app

pytestmark = pytest.mark.engine

SHORT = ["workload.num_prompts=1", "workload.output_len=12", "repeats=3", "warmup=0", "perplexity_tokens=0"]
SHORT += ["engine.enforce_eager=true", "engine.kv_cache_gib=0.1"]
MEASURED = [
    words
    for words in of_kind("selfspec", README, INDEX)
    if words[1] in ("sweep", "bench") and not any(word.startswith(("model=", "engine=")) for word in words)
]
SERVED = [words for words in of_kind("selfspec", README, INDEX) if words[1] == "serve" and "engine=gpu" not in words]


def test_the_first_server_answers_the_client_of_the_page_and_counts(tmp_path, monkeypatch):
    openai = pytest.importorskip("openai")
    (words,) = SERVED
    (client,) = [block for block in python_blocks(INDEX) if "OpenAI(" in block]
    (metrics,) = [line for line in lines(INDEX) if line.startswith("curl ")]
    with served(Path(tmp_path), words[2:]) as (_, url, log):
        monkeypatch.setattr(openai.OpenAI, "__init__", _at(url, openai.OpenAI.__init__))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(client, str(INDEX), "exec"), {})
        assert len(out.getvalue()) > 20
        line = metrics.replace("localhost:8000", url.removeprefix("http://"))
        shown = subprocess.run(["bash", "-c", line], capture_output=True, text=True).stdout
        assert "spec_decode_num_accepted_tokens_total" in shown and "num_requests_running" in shown
        assert "drafting with layers 0 to 2 of 24" in log.read_text(encoding="utf-8")


@pytest.mark.parametrize("words", MEASURED, ids=" ".join)
def test_what_is_measured_is_in_the_report(words, tmp_path, monkeypatch):
    """In this process, which has imported vLLM; test_screen.py has a sweep as a user starts it."""
    monkeypatch.chdir(tmp_path)
    for command in (words[1:] + SHORT, ["report"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output[-4000:]
    assert "baseline" in done.output and (tmp_path / "results" / "report.html").is_file()


def _at(url, begin):
    """OpenAI's client with the address of the test's server."""
    return lambda self, **options: begin(self, **options | {"base_url": f"{url}/v1"})
