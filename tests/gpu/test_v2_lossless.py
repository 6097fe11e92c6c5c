"""Greedy drafting changes no token on vLLM's V2 model runner: bf16, CUDA graphs, batch-invariant kernels.

VLLM_BATCH_INVARIANT=1 makes a token's logits the same bits whatever else is in the batch, so that verifying k drafts at
once and decoding one token at a time can be compared in bf16 at all.

    python -m pytest tests/gpu              # or, where there is no pytest:
    python tests/gpu/test_v2_lossless.py    # a line a case, then one line of JSON; exit code 1 if anything differs
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

if torch.cuda.is_available():  # collected elsewhere too, where it must not change what other tests run
    os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from harness import differing, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, MAX_LEN, VOCAB, save_tiny

try:
    import pytest
except ModuleNotFoundError:  # a GPU machine without test tools runs this file as a script
    pytest = None  # type: ignore[assignment]

MODELS = ("llama", "qwen3")
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
GPU = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "kv_cache_memory_bytes": 2**30,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
}
PROMPTS = [
    *ragged_prompts(32, VOCAB),
    *((prompt * 20)[: MAX_LEN - 3 - 5 * number] for number, prompt in enumerate(ragged_prompts(4, VOCAB, seed=1))),
]
LENGTHS = [(64, 128, 200)[number % 3] for number in range(32)] + [64] * 4  # the last four reach max_model_len
POINTS = [(1, 1), (LAYERS // 4, 3), (LAYERS // 2, 5), (LAYERS - 1, 8)]


@dataclass
class Case:
    """One engine, and what became of it."""

    model: str
    layer: int
    k: int
    changes: dict[str, Any]
    requests: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    different: tuple[int, ...] = ()
    seconds: float = 0.0

    @property
    def name(self) -> str:
        changes = "".join(f" {key}={value}" for key, value in self.changes.items())
        return f"{self.model} E={self.layer} k={self.k}{changes}"

    def passed(self) -> bool:
        """Drafts were made, some were accepted and some were not, and no request differs."""
        return 0 < self.accepted < self.drafted and not self.different


def cases() -> Iterator[Case]:
    for model in MODELS:
        for layer, k in POINTS:
            yield Case(model, layer, k, {})
        yield Case(model, LAYERS // 2, 5, {"enforce_eager": True})
        yield Case(model, LAYERS // 2, 5, {"async_scheduling": False})


@cache
def model_dir(model: str) -> Path:
    return save_tiny(model, Path(tempfile.mkdtemp(prefix=f"selfspec-{model}-")), **SHAPE)


@cache
def baseline(model: str) -> list[list[int]]:
    """What the plain engine generates."""
    with live(model_dir(model), **GPU) as engine:
        assert engine.llm.llm_engine.vllm_config.use_v2_model_runner, "this is a test of the V2 model runner"
        return tokens(engine.generate(PROMPTS, [greedy(length) for length in LENGTHS]))


def run(case: Case) -> Case:
    """Fill in `case` from a drafting engine."""
    expected = baseline(case.model)
    start = time.perf_counter()
    with live(model_dir(case.model), layer_skip(case.layer, case.k), **(GPU | case.changes)) as engine:
        outputs = tokens(engine.generate(PROMPTS, [greedy(length) for length in LENGTHS]))
        counts = engine.counts()
    case.seconds = round(time.perf_counter() - start, 1)
    case.requests, case.tokens = len(outputs), sum(map(len, outputs))
    case.drafted, case.accepted = counts.drafted, counts.accepted
    case.different = tuple(differing(outputs, expected))
    for index in case.different[:3]:
        print(f"    request {index}: {first_difference(outputs[index], expected[index])}")
    return case


def first_difference(got: list[int], want: list[int]) -> str:
    at = next(
        (i for i, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1]), min(len(got), len(want))
    )
    return f"first differs at token {at} of {len(want)}: {got[at : at + 4]}, not {want[at : at + 4]}"


def beside_samples(model: str) -> list[int]:
    """Greedy requests in one batch with sampled ones, drafts drawn from the head's distribution. Those that differ."""
    expected = baseline(model)[:16]
    spec = layer_skip(LAYERS // 2, 5, draft_sample_method="probabilistic")
    with live(model_dir(model), spec, **GPU) as engine:
        params = [greedy(length) for length in LENGTHS[:16]]
        sampled = [greedy(64, temperature=0.8, seed=seed) for seed in range(16)]
        mixed = [item for pair in zip(params, sampled, strict=True) for item in pair]
        prompts = [prompt for prompt in PROMPTS[:16] for _ in range(2)]
        outputs = tokens(engine.generate(prompts, mixed))
        engine.counts().require_both_verdicts()
    assert all(len(output) == 64 for output in outputs[1::2])
    return differing(outputs[::2], expected)


if pytest is not None:

    @pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
    def test_greedy(case):
        done = run(case)
        assert done.passed(), done

    @pytest.mark.parametrize("model", MODELS)
    def test_greedy_requests_beside_sampled_ones(model):
        assert beside_samples(model) == []


def main() -> int:
    done = []
    for case in cases():
        done.append(run(case))
        print(f"{'ok  ' if case.passed() else 'FAIL'} {case.name}: {case.drafted} drafted, {case.accepted} accepted, "
              f"{len(case.different)} of {case.requests} differ, {case.seconds} s", flush=True)  # fmt: skip
    mixed = {model: beside_samples(model) for model in MODELS}
    passed = all(case.passed() for case in done) and not any(mixed.values())
    print(json.dumps({"passed": passed, "beside_samples": mixed, "cases": [asdict(case) for case in done]}))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
