"""What a user sees of a real engine at work: selfspec's lines, and vLLM's only in the log.

The commands of README.md and docs/index.md that measure on a CPU are run too, on less of the same; test_server.py
starts their server."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from first_lines import INDEX, README, of_kind
from models import save_tiny
from pseudo_terminal import Terminal
from served import wait_for
from typer.testing import CliRunner

from selfspec_cli.commands.app import app

WORDS = ["sweep", "gate=varH", "tau_v=4,5", "layer=3", "k=3", "model=./tiny", "model.max_model_len=256"]
WORDS += [
    "engine.enforce_eager=true",
    "engine.kv_cache_gib=0.1",
    "engine.extra.skip_tokenizer_init=true",
    "workload.prompts=random",
]
WORDS += ["workload.num_prompts=2", "workload.output_len=48", "perplexity_tokens=0"]
FOREIGN = ("INFO", "WARNING", "Triton", "NUMA", "safetensors", "vllm/", "UserWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("screen")
    save_tiny("llama", made / "tiny")
    return made


def test_a_sweep_shows_its_own_lines_only(folder):
    env = {name: value for name, value in os.environ.items() if name != "VLLM_LOGGING_LEVEL"}
    words = [sys.executable, "-m", "selfspec_cli", *WORDS]
    shown = Terminal(words, folder, 80, env | {"TERM": "xterm-256color"}, timeout=480).read()
    assert shown.child.exitstatus == 0, shown.last
    assert not [word for word in FOREIGN if word in shown.raw]
    (log,) = (folder / "results" / "logs").glob("*.log")
    assert "INFO" in log.read_text() and "safetensors" in log.read_text()
    assert "3 measured, 0 skipped, 0 failed" in shown.last
    assert any("3 of 3 arms measured" in seen or "2 of 3 arms measured" in seen for seen in shown.seen)


SHORT = ["workload.num_prompts=1", "workload.output_len=12", "repeats=3", "warmup=0", "perplexity_tokens=0"]
SHORT += ["engine.enforce_eager=true", "engine.kv_cache_gib=0.1"]
MEASURED = [
    words
    for words in of_kind("selfspec", README, INDEX)
    if words[1] in ("sweep", "bench") and not any(word.startswith(("model=", "engine=")) for word in words)
]


@pytest.mark.parametrize("words", MEASURED, ids=" ".join)
def test_what_a_page_measures_is_in_the_report(words, tmp_path, monkeypatch):
    """In this process, which has imported vLLM."""
    monkeypatch.chdir(tmp_path)
    for command in (words[1:] + SHORT, ["report"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output[-4000:]
    assert "baseline" in done.output and (tmp_path / "results" / "report.html").is_file()


def test_one_that_gets_sigterm_while_its_engines_process_starts_leaves_no_process(folder):
    """As on a GPU, where vLLM drops the interrupt while it waits for that process, which would outlive the command."""
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    words = [sys.executable, "-m", "selfspec_cli", *WORDS, "results_dir=ended"]
    with open(folder / "ended.txt", "w+") as said:
        command = subprocess.Popen(words, cwd=folder, env=env, stdout=said, stderr=said, start_new_session=True)
        try:
            wait_for(lambda: any("EngineCore" in line for line in of_session(command.pid)), "an engine", command)
            command.send_signal(signal.SIGTERM)
            assert command.wait(240) == 130
            wait_for(lambda: not of_session(command.pid), "the end of the engine's processes")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(command.pid, signal.SIGKILL)
        said.seek(0)
        assert "interrupted; what was measured so far is kept" in said.read()


def of_session(number: int) -> list[str]:
    """Command lines of the processes of a session that have not ended."""
    shown = subprocess.run(["ps", "-s", str(number), "-o", "stat=,args="], capture_output=True, text=True).stdout
    return [line for line in shown.splitlines() if not line.startswith("Z")]
