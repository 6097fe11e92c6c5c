"""`selfspec`, on engines that generate at once, beside libraries that print wherever they can.

Started as a process by test_terminal.py. NOISY_FAIL=WORD: the point whose gate has that threshold fails, or with
`start` every engine. NOISY_START=SECONDS: what an engine's start takes.
"""

import logging
import os
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

from selfspec_cli import interrupts
from selfspec_cli.config.schema import Method
from selfspec_cli.early_exit.counters import VerifyCounts
from selfspec_cli.engine import live
from selfspec_cli.record.statistics import RequestTimes

FAIL, START = os.environ.get("NOISY_FAIL", ""), float(os.environ.get("NOISY_START", "0"))


def noise(word):
    """In every way that a library can print."""
    print(f"noise-print {word}")
    print(f"noise-stderr {word}", file=sys.stderr)
    logging.getLogger("vllm").warning("noise-logging %s", word)
    warnings.warn(f"noise-warning {word}", stacklevel=1)
    os.write(1, f"noise-fd1 {word}\n".encode())
    os.write(2, f"noise-fd2 {word}\n".encode())
    subprocess.run(["sh", "-c", f"echo noise-child1 {word}; echo noise-child2 {word} >&2"], check=True)


@dataclass
class Engine:
    cfg: object
    layer = 3
    weights_mib, draft_mib, kv_blocks, max_model_len, vocab_size = 10.0, 1.0, 99, 512, 50

    def call(self, method, *words):
        return {"early_exit_meter_stop": {}}.get(method)

    def set_gate(self, kind, threshold):
        if str(threshold) == FAIL:
            noise("before-it-fails")
            raise RuntimeError("the engine core is dead")

    def generate(self, prompts, output_len, *, batch, temperature, seed):
        noise("generate")
        with interrupts.deferred():
            for _ in range(5):
                time.sleep(0.01)
                interrupts.check()
        fast = 0.5 if self.cfg.method is Method.layer_skip else 1.0
        times = [RequestTimes(0.0, (0.1, 0.2), output_len) for _ in prompts]
        drafts = VerifyCounts(10, 40, 20, [8, 6, 4, 2]) if self.cfg.method is Method.layer_skip else None
        return live.Generation([[7] * output_len] * len(prompts), fast, times, drafts)


@contextmanager
def open_engine(cfg, **more):
    with interrupts.at_once():
        noise("start")
        time.sleep(START)
        if FAIL == "start":
            raise RuntimeError("no memory")
    yield Engine(cfg)
    noise("stop")


if __name__ == "__main__":
    from selfspec_cli.__main__ import main

    logging.basicConfig()
    live.open_engine = open_engine
    main()
