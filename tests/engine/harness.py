"""Live vLLM engines over tiny models, and what the tests ask of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from typing import Any

from fixed_times import fix_times

WORKER_EXTENSION = "selfspec_cli.vllm_plugin.worker.EarlyExitWorker"

# One setting for each gate that closes some drafts of the tiny models and not others (the tests check that it does).
GATES: dict[str, float | None] = {
    "none": None,
    "maxp": 0.3,
    "varH": 4.0,
    "entropy": 2.5,
    "margin": 0.15,
    "adaedl": 0.3,
    "survival": 0.15,
}
CHANGING = [("none", None), ("survival", 0.2), ("maxp", 0.5), ("varH", 4.0), ("adaedl", 0.3)]
"""Gates, for tests that change them on a live engine."""
_names = count()


@dataclass(frozen=True)
class Counts:
    """vLLM's own counters: rounds (of one request each), tokens drafted, tokens accepted."""

    rounds: int
    drafted: int
    accepted: int

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.rounds - other.rounds, self.drafted - other.drafted, self.accepted - other.accepted)

    def require_both_verdicts(self) -> None:
        """A lossless test shows nothing unless drafts were made, some accepted and some rejected."""
        assert 0 < self.accepted < self.drafted, self


@dataclass
class Live:
    """A running engine."""

    llm: Any
    broken: bool = False

    def generate(self, prompts: Sequence[list[int]], params: Any) -> list[Any]:
        """One finished request a prompt, in their order; params: one SamplingParams, or one a prompt."""
        # An engine that raised in the middle of a step keeps its requests and never finishes them.
        assert not self.broken, "an earlier test broke this engine"
        self.broken = True
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        self.broken = False
        return outputs

    def gives(self, prompts: Sequence[list[int]], params: Any, expected: Sequence[list[int]]) -> Counts:
        """Generate, and compare with the tokens expected of each prompt. What vLLM counted meanwhile."""
        before = self.counts()
        wrong = differing(tokens(self.generate(prompts, params)), expected)
        assert not wrong, f"prompts {wrong} of {len(expected)} differ from the baseline"
        return self.counts() - before

    def step_through(
        self, prompts: Sequence[list[int]], params: Sequence[Any], between: Callable[[list[str]], None]
    ) -> list[Any]:
        """As `generate`, step by step. between: called before each step with the requests' names. None for a request
        that it aborts."""
        core, done = self.llm.llm_engine, dict[str, Any]()
        names = [f"stepped-{next(_names)}" for _ in prompts]
        for name, prompt, wanted in zip(names, prompts, params, strict=True):
            core.add_request(name, {"prompt_token_ids": prompt}, wanted)
        while core.has_unfinished_requests():
            between(names)
            done |= {out.request_id: out for out in core.step() if out.finished}
        return [done.get(name) for name in names]

    def metric(self, name: str) -> int:
        """One of vLLM's counters since the engine started; 0 for one that it does not keep."""
        return sum(int(metric.value) for metric in self.llm.get_metrics() if metric.name == f"vllm:{name}")

    def counts(self) -> Counts:
        """Counted since the engine started."""
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        return Counts(*(self.metric(f"spec_decode_{name}") for name in names))

    def call(self, method: str, *args: Any) -> Any:
        """What the worker answers."""
        return self.llm.collective_rpc(method, args=args)[0]

    @property
    def runner(self) -> Any:
        """The model runner, which is in this process where the engine has one rank."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def drafter(self) -> Any:
        """What drafts on a V1 engine."""
        return self.runner.drafter

    def watch_proposals(self, note: Callable[[Any, list[list[int]]], None]) -> None:
        """From now on `note` is called after each round of a V1 engine, with its drafter and the drafts."""
        drafter, propose = self.drafter, self.drafter.propose

        def watched(*args: Any, **kwargs: Any) -> list[list[int]]:
            drafts = propose(*args, **kwargs)
            note(drafter, drafts)
            return drafts

        drafter.propose = watched

    def draft_also_what_does_not_pay(self) -> None:
        """On a V1 engine with prompt lookup, where steps of half the layers would hardly be taken."""
        self.drafter.worth = None

    def fix_times(self, draft_step: float = 0.2) -> None:
        """What the rule of a V1 engine hears of steps is the same in every run; draft_step: in plain steps."""
        fix_times(self.drafter.lengths.rule, draft_step)


@contextmanager
def live(path: Path, spec: dict[str, Any] | None = None, **changes: Any) -> Iterator[Live]:
    """An engine for `path`: fp32, eager, chunked prefill (64 tokens a step), prefix caching, 8 requests at a time."""
    from vllm import LLM

    from selfspec_cli.engine.live import _free
    from selfspec_cli.vllm_plugin.worker import leave_worker_classes

    arguments: dict[str, Any] = {
        "model": str(path),
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 2**26,
        "block_size": 32,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "worker_extension_cls": WORKER_EXTENSION,
        "speculative_config": spec,
    }
    llm = None
    try:
        leave_worker_classes()
        llm = LLM(**{**arguments, **changes})
        yield Live(llm)
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        _free()


def layer_skip(layer: int, k: int, **more: Any) -> dict[str, Any]:
    """A speculative_config as users write it."""
    return {"method": "layer_skip", "layer_skip": layer, "num_speculative_tokens": k, **more}


def change_everything(engine: Live, k: int) -> Callable[[list[str]], None]:
    """What changes gate, threshold, draft length, table and the record, between any two steps of an engine. k: its."""
    settings, lengths = cycle(CHANGING), cycle([k, 2, 0, 5, 1, 4, 3])
    tables = cycle([None, "1:5 3:2", *[None] * 4, "1:3 2:0 4:4"])
    records = cycle([True, *[None] * 6, False, *[None] * 3])

    def change(_: list[str]) -> None:
        engine.call("early_exit_set_gate", *next(settings))
        engine.call("early_exit_set_draft_length", next(lengths))
        engine.call("early_exit_set_length_table", next(tables))
        if (on := next(records)) is not None:
            engine.call("early_exit_record", on)

    return change


def ragged_prompts(count: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 170 tokens; most begin with 40 or 100 tokens that others share, so the prefix cache has hits."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, vocab) for _ in range(100)]
    return [
        shared[: draw.choice([0, 40, 100])] + [draw.randrange(3, vocab) for _ in range(draw.randrange(1, 70))]
        for _ in range(count)
    ]


def greedy(max_tokens: int, **more: Any) -> Any:
    """Greedy SamplingParams for exactly `max_tokens` tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False} | more
    )


def tokens(outputs: Sequence[Any]) -> list[list[int]]:
    """The generated token ids of each request's first sample."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def differing(outputs: Sequence[list[int]], expected: Sequence[list[int]]) -> list[int]:
    """Which of the requests have another output than expected."""
    return [index for index, pair in enumerate(zip(outputs, expected, strict=True)) if pair[0] != pair[1]]
