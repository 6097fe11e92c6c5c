"""The commands of README.md and docs/index.md that measure on a CPU are run, on less of the same; test_server.py starts
their server."""

from __future__ import annotations

import pytest
from first_lines import INDEX, README, of_kind
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


@pytest.mark.parametrize("words", MEASURED, ids=" ".join)
def test_what_is_measured_is_in_the_report(words, tmp_path, monkeypatch):
    """In this process, which has imported vLLM; test_screen.py has a sweep as a user starts it."""
    monkeypatch.chdir(tmp_path)
    for command in (words[1:] + SHORT, ["report"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output[-4000:]
    assert "baseline" in done.output and (tmp_path / "results" / "report.html").is_file()
