"""The one place that builds a `vllm.LLM`, and the few things that stages ask of it, in plain values.

Timings are of a closed loop of `batch` requests through vLLM's own queue; accept figures are vLLM's counters.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.config.facts import device_of
from selfspec_cli.config.schema import SPECULATIVE, ConfigError, Method, RunConfig, Runner
from selfspec_cli.early_exit import counters, resolved
from selfspec_cli.early_exit.counters import VerifyCounts
from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.view import DraftView
from selfspec_cli.engine.deployment import RUNNER, llm_arguments, runner_variables
from selfspec_cli.record.statistics import RequestTimes
from selfspec_cli.texts.prompts import Tokens, Turn
from selfspec_cli.vllm_plugin.interpreted import interpret_kernels
from selfspec_cli.vllm_plugin.worker import leave_worker_classes, register_kernels_once

MIB = 2**20
OpenEngine = Callable[..., AbstractContextManager["Engine"]]  # starts an engine for a config, as `open_engine` does


@dataclass
class Generation:
    """What one closed loop generated. outputs: token ids, in the order of the prompts, like all lists here. seconds:
    wall time from the first request in to the last token out. requests: raw times. verified: vLLM's counters; drafting:
    the draft loop's own; None where there are none. steps: tokens of each output of each request."""

    outputs: list[list[int]]
    seconds: float
    requests: list[RequestTimes]
    verified: VerifyCounts | None
    drafting: counters.Snapshot | None = None
    steps: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, all requests together."""
        return sum(map(len, self.outputs)) / self.seconds

    @property
    def drafted(self) -> int:
        """Tokens drafted: the draft loop's own count, or the places verified of a drafter that keeps none; else 0."""
        if self.drafting is not None:
            return counters.made(self.drafting)
        return self.verified.places if self.verified is not None else 0


@dataclass
class Engine(Tokens):
    """A live vLLM engine."""

    llm: Any
    cfg: RunConfig
    num_layers: int
    weights_mib: float  # the target's weights and whatever the arm holds beside them (an exit head)
    draft_mib: float  # of these, what drafting adds
    start_seconds: float  # that it took to start, without vLLM's first import in this process
    _requests: int = field(default=0, repr=False)
    _length: int | None = field(default=None, repr=False)  # asked for by every request; None: the engine's own

    @property
    def layer(self) -> int | None:
        """The exit layer E in force; None for a baseline, and for drafts of vLLM's own."""
        if self.cfg.method in (Method.baseline, Method.vllm):
            return None
        cfg = self.cfg
        return cfg.layer or DraftView.of(cfg).default_layer(self.num_layers)

    @property
    def max_model_len(self) -> int:
        """Tokens that prompt and output may have together."""
        return int(self.llm.model_config.max_model_len)

    @property
    def kv_blocks(self) -> int:
        return int(self.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to this, exclusive."""
        return int(self.llm.model_config.get_vocab_size())

    @property
    def tokenizer(self) -> Any:
        return self.llm.get_tokenizer()

    def set_gate(self, kind: str, threshold: float | None) -> None:
        """Change the gate of a drafting engine between two rounds; nothing is reloaded."""
        self.llm.collective_rpc("early_exit_set_gate", args=(kind, threshold))

    def set_draft_length(self, k: int) -> None:
        """Draft at most k tokens a round, 0 to the config's k. Requests ask for it too, for the scheduler on CUDA."""
        self.llm.collective_rpc("early_exit_set_draft_length", args=(k,))
        self._length = k

    @contextmanager
    def recording(self) -> Iterator[Callable[[], DraftLog]]:
        """Keep a record of what is drafted inside the block; the function given reads it, also while it grows."""
        assert self.cfg.k is not None
        k = self.cfg.k
        self.call("early_exit_record", True)
        try:
            yield lambda: DraftLog.from_plain(self.call("early_exit_recorded"), k)
        finally:
            self.call("early_exit_record", False)

    def call(self, method: str, *args: Any) -> Any:
        """The first worker's answer to one of `EarlyExitWorker`'s methods."""
        return self.llm.collective_rpc(method, args=args)[0]

    def generate(
        self,
        prompts: Sequence[Turn],
        output_len: int,
        *,
        batch: int,
        temperature: float = 0.0,
        seed: int = 0,
        detokenize: bool = False,
    ) -> Generation:
        """Generate exactly `output_len` tokens for each prompt, `batch` requests in flight. A later turn begins when
        the turn before it has ended, in its place. temperature: 0 is greedy; above it each request has a seed of its
        own, so a repeat repeats. detokenize: make text of the tokens too, as a server does."""
        from vllm import SamplingParams

        def parameters(number: int) -> Any:
            return SamplingParams(
                temperature=temperature,
                max_tokens=output_len,
                ignore_eos=True,
                detokenize=detokenize,
                seed=seed + number if temperature > 0 else None,
                extra_args=None if self._length is None else {resolved.K: self._length},
            )

        before, own = self.verify_counts(), self._drafting()
        start = time.perf_counter()
        with interrupts.deferred():
            outputs, requests, steps = self._closed_loop(prompts, parameters, batch, start)
        seconds = time.perf_counter() - start
        after = self.verify_counts()
        return Generation(
            outputs=outputs,
            seconds=seconds,
            requests=requests,
            verified=None if before is None or after is None else after.since(before),
            drafting=counters.since(self._drafting(), own),
            steps=steps,
        )

    def new_request(self) -> str:
        """A name that no request of this engine has had."""
        self._requests += 1
        return f"selfspec-{self._requests}"

    def _closed_loop(
        self, prompts: Sequence[Turn], parameters: Callable[[int], Any], batch: int, start: float
    ) -> tuple[list[list[int]], list[RequestTimes], list[list[int]]]:
        """Token ids, times (seconds since `start`) and tokens of each output of each prompt's request; an interrupt
        ends it between steps. All outputs of one engine step arrive at one moment."""
        core, clock = self.llm.llm_engine, time.perf_counter
        numbers: dict[str, int] = {}
        arrived = [0.0 for _ in prompts]
        events: list[list[float]] = [[] for _ in prompts]
        sizes: list[list[int]] = [[0] for _ in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        begins = [number for number, prompt in enumerate(prompts) if not callable(prompt)]
        waiting = iter(begins)

        def submit(number: int | None) -> None:
            if number is None:
                return
            name, prompt = self.new_request(), prompts[number]
            ids = prompt(tokens[max(one for one in begins if one < number) : number]) if callable(prompt) else prompt
            numbers[name] = number
            arrived[number] = clock() - start
            core.add_request(name, {"prompt_token_ids": ids}, parameters(number))

        for _ in range(batch):
            submit(next(waiting, None))
        while core.has_unfinished_requests():
            outputs = core.step()
            moment = clock() - start
            for output in outputs:
                number = numbers[output.request_id]
                events[number].append(moment)
                sizes[number].append(len(output.outputs[0].token_ids))
                if output.finished:
                    tokens[number] = list(output.outputs[0].token_ids)
                    follows = number + 1 < len(prompts) and callable(prompts[number + 1])
                    submit(number + 1 if follows else next(waiting, None))
            interrupts.check()
        times = [RequestTimes(*one) for one in zip(arrived, map(tuple, events), map(len, tokens), strict=True)]
        return tokens, times, [[later - earlier for earlier, later in pairwise(some)] for some in sizes]

    def _drafting(self) -> counters.Snapshot | None:
        return self.call("early_exit_counters") if self.cfg.method is Method.layer_skip else None

    def verify_counts(self) -> VerifyCounts | None:
        """vLLM's counters of speculative decoding since the engine started; None for an engine that does not draft."""
        if self.cfg.method not in SPECULATIVE:
            return None
        values: dict[str, Any] = {}
        for metric in self.llm.get_metrics():
            if metric.name.startswith("vllm:spec_decode"):
                values[metric.name] = getattr(metric, "values", None) or metric.value
        return VerifyCounts(
            rounds=int(values["vllm:spec_decode_num_drafts"]),
            places=int(values["vllm:spec_decode_num_draft_tokens"]),
            accepted=int(values["vllm:spec_decode_num_accepted_tokens"]),
            accepted_at=[int(count) for count in values["vllm:spec_decode_num_accepted_tokens_per_pos"]],
        )


@contextmanager
def open_engine(cfg: RunConfig, **extra: Any) -> Iterator[Engine]:
    """Start an engine for `cfg` and shut it down at the end. extra: arguments of vllm.LLM that win. Raises ConfigError:
    what `cfg` asks for cannot be had; nothing is left of the engine."""
    if device_of(cfg) == "cpu":
        # The engine in this process: one process fewer on a machine with few cores, and errors keep their type.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # vLLM 0.32 saves ahead-of-time artifacts on the CPU that it then fails to load; PyTorch's own cache works, and
        # an engine that was compiled before starts in a quarter of the time.
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
        if cfg.runner is Runner.v2:
            interpret_kernels()
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", how_they_start())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    llm = None
    try:
        with interrupts.at_once(), TemporaryDirectory(prefix="selfspec-") as scratch, _model_runner(cfg):
            from vllm import LLM

            leave_worker_classes()
            if device_of(cfg) == "cpu":
                register_kernels_once()
            began = time.perf_counter()
            llm = LLM(**{**llm_arguments(cfg, Path(scratch)), **extra})
            start_seconds = time.perf_counter() - began
        if device_of(cfg) == "cpu":
            llm.collective_rpc("early_exit_split_seeded_prompts")
        weights = llm.collective_rpc("early_exit_weights")
        layers = llm.collective_rpc("early_exit_layers")[0]
        target = sum(share["target"] for share in weights) / MIB
        draft = sum(share["draft"] for share in weights) / MIB
        yield Engine(llm, cfg, layers, target + draft, draft, start_seconds)
    except Exception as error:
        raise _as_bad_input(error) from error
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        _free()


@contextmanager
def _model_runner(cfg: RunConfig) -> Iterator[None]:
    """While an engine starts: vLLM reads which model runner to use from its environment, and workers inherit it."""
    before = os.environ.get(RUNNER)
    os.environ.update(runner_variables(cfg))
    try:
        yield
    finally:
        os.environ.pop(RUNNER, None)
        if before is not None:
            os.environ[RUNNER] = before


def fork_engines(cfg: RunConfig) -> None:
    """Have engines on a GPU forked from this process, which spares each half a minute of importing vLLM on a slow host.
    PyTorch is kept to one thread here (see `how_they_start`), as engines do the work."""
    if device_of(cfg) != "cpu":  # such an engine runs in this process, with all of its cores
        import torch

        torch.set_num_threads(1)


def how_they_start() -> str:
    """vLLM's word for how an engine's process starts. A forked engine hangs in its first parallel operation once
    PyTorch has run one here, as it does counting a draft vocabulary; with one thread it runs none."""
    import torch

    return "fork" if torch.get_num_threads() == 1 else "spawn"


def _as_bad_input(error: Exception) -> Exception:
    """vLLM wraps what its config checks raise; give bad input its own type back."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConfigError):
            return cause
        if getattr(cause, "title", None) == "SpeculativeConfig" and hasattr(cause, "errors"):  # pydantic's
            return ConfigError(f"speculative: {'; '.join(problem['msg'] for problem in cause.errors())}")
        cause = cause.__cause__ or cause.__context__
    return error


def _free() -> None:
    """Give the memory of a shut-down engine back before the next one starts."""
    clean_up = getattr(sys.modules.get("vllm.distributed.parallel_state"), "cleanup_dist_env_and_memory", None)
    if clean_up is None:
        return  # an interrupt came while vLLM was imported: importing the rest of it would take seconds
    # In a parent of worker processes there is nothing to tear down, and that is fine.
    clean_up()
    gc.collect()
    import torch

    # vLLM drops Dynamo's guards, so code compiled for one engine would also be run for the next one in this process,
    # whatever its exit layer.
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
