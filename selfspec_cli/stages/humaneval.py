"""pass@1 of HumanEval: answers are run with the tests of their tasks, each in a process of its own with limits.

Limits are of time, memory and disk. They are no sandbox: the code has this user's rights, files to read and network.
"""

import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfspec_cli import children
from selfspec_cli.config.schema import HUMANEVAL, ConfigError, RunConfig
from selfspec_cli.texts import prompt_files
from selfspec_cli.texts.prompts import file_prompts

SECONDS, MIB = 10, 1024  # that an answer may take with its tests: of time, and of memory
WARNING = (
    "--execute runs code that the model writes: in processes with limits on time, memory and files, but with your "
    "rights; do it on a machine that holds nothing of value"
)
# Runs a file under limits: processor seconds, bytes of memory, of a file that is written, open files, no core dump.
_LIMITED = (
    "import resource as r, sys\n"
    "seconds, memory = int(sys.argv[2]), int(sys.argv[3])\n"
    "for name, most in ((r.RLIMIT_CPU, seconds), (r.RLIMIT_AS, memory), (r.RLIMIT_FSIZE, 2**20), "
    "(r.RLIMIT_NOFILE, 64), (r.RLIMIT_CORE, 0)):\n"
    "    r.setrlimit(name, (most, most))\n"
    "exec(compile(open(sys.argv[1], encoding='utf-8').read(), 'answer', 'exec'), {'__name__': 'answer'})\n"
)
_BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)
_BEHIND = re.compile(r"\n(?:def |class |if |print\(|#|@|```)")  # what a completion goes on with after its function


def check(cfgs: Sequence[RunConfig]) -> None:
    """Refuse to execute what is no code; raises ConfigError."""
    for cfg in cfgs:
        workload, launcher = cfg.workload, cfg.launcher.kind
        if workload.prompts != HUMANEVAL:
            raise ConfigError(f"--execute with workload={workload.name}: only workload=humaneval has tests to run")
        if launcher != "local":
            raise ConfigError(f"--execute with launcher={launcher}: answers run where the command does; leave one out")


def scored(cfg: RunConfig, answers: Sequence[str]) -> list[int]:
    """[answers that pass, of how many]. answers: as text, to the prompts of `cfg` in their order."""
    tasks = {task["prompt"]: task for task in prompt_files.rows(cfg.workload.prompts)}
    pairs = zip(file_prompts(cfg), answers, strict=True)
    return [sum(passes(program(tasks[prompt.text], answer)) for prompt, answer in pairs), len(answers)]


def program(task: dict[str, Any], answer: str) -> str:
    """The source that runs to its end if an answer, a chat's code block or a continuation, passes its task's tests."""
    name, prompt = task["entry_point"], task["prompt"]
    block = _BLOCK.search(answer)
    code = prompt + _BEHIND.split(answer)[0] if block is None else block[1]
    if f"def {name}(" not in code:  # a block with the body alone
        code = prompt + code
    before = prompt[: prompt.index(f"def {name}(")]  # imports, and functions that tests use
    return f"{before}\n{code}\n{task['test']}\ncheck({name})\n"


def passes(source: str, seconds: int = SECONDS, mib: int = MIB) -> bool:
    """Whether a program runs to its end within the limits."""
    end = secrets.token_hex(8)  # an answer that ends the process early prints no such word
    with tempfile.TemporaryDirectory(prefix="selfspec-") as folder:
        file = Path(folder) / "answer.py"
        file.write_text(f"{source}\nprint({end!r})\n", encoding="utf-8", errors="replace")
        command = [sys.executable, "-I", "-c", _LIMITED, str(file), str(seconds), str(mib * 2**20)]
        out, null = subprocess.PIPE, subprocess.DEVNULL
        run = subprocess.Popen(command, cwd=folder, env={}, stdin=null, stdout=out, stderr=null, start_new_session=True)
        try:
            said, _ = run.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            children.end(run, signal.SIGKILL, 1.0)  # with whatever it has started
    return run.returncode == 0 and said.decode(errors="replace").rstrip().endswith(end)
