"""Greedy drafting changes no token on vLLM's V2 model runner: bf16, CUDA graphs, batch-invariant kernels.

VLLM_BATCH_INVARIANT=1 makes a token's logits the same bits whatever else is in the batch, so that verifying k drafts at
once and decoding one token at a time can be compared in bf16 at all. Without it outputs may part at near-ties, which
`selfspec verify` tells from faults (verify_shapes.py).

    python -m pytest tests/gpu              # or, where there is no pytest:
    python tests/gpu/test_v2_lossless.py [--only SUBSTRING ...] [--part I/N] [--tensor-parallel N]
                                         [--group NAME] [--gates] [--out FILE]

As a script: a line a case, and all of it as JSON in FILE, written after each case; exit code 1 if anything differs."""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

if torch.cuda.is_available():  # collected elsewhere too, where it must change nothing
    os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault(
    "VLLM_WORKER_MULTIPROC_METHOD", "spawn"
)  # workers of a tensor-parallel engine; CUDA is up already
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1]))  # fixed_times
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from harness import CHANGING, GATES, Live, differing, greedy, layer_skip, live, ragged_prompts, tokens
from models import ARCHITECTURES, LAYERS, MAX_LEN, VOCAB, save_tiny, save_tokenizer
from more_models import (
    IMAGE,
    RANK,
    SEES,
    pictures,
    save_adapter,
    save_awq,
    save_gptq,
    save_quantised,
    save_with_eyes,
    save_with_several_positions,
    without_video_processor,
)
from shapes import shape
from v2_engine import alternating

from selfspec_cli.early_exit.draft_log import DraftLog

try:
    import pytest
except ModuleNotFoundError:  # a GPU machine without test tools runs this file as a script
    pytest = None  # type: ignore[assignment]

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # CUDA graphs without torch.compile: engines start quickly
GPU: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "compilation_config": GRAPHS,
    "kv_cache_memory_bytes": 2**30,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "max_model_len": MAX_LEN,
    "gpu_memory_utilization": 0.1,  # several of these engines may share a GPU, one from each of several processes
}
COMPILED: dict[str, Any] = {"compilation_config": {"inductor_compile_config": {"deterministic": True}}}
"""Otherwise Inductor times several kernels for the norms on Qwen3's heads when an engine starts, and takes the fastest
for each layer. They add up in different orders, so the first start of a plain engine differs from the later ones, which
take what was stored (pytorch/pytorch#174711)."""
EAGER = {"enforce_eager": True}
WAYS: tuple[dict[str, Any], ...] = ({}, COMPILED, EAGER)
"""In CUDA graphs alone, compiled, and eagerly."""
MANY = {"max_num_seqs": 256, "max_num_batched_tokens": 2048}
PREEMPTING = {"kv_cache_memory_bytes": 24 * 2**20}
"""Too small a cache for all requests of a batch."""
INT4, GATE = {"draft_weights": "int4"}, {"gate": "maxp", "tau": 0.2}
NO_PICTURES, ONE_PICTURE = ({"limit_mm_per_prompt": {"image": count, "video": 0}} for count in (0, 1))
FITTED = "fitted"  # in the place of a path: copies that were fitted to what the model makes of the prompts
FP8_KEYS = {"kv_cache_dtype": "fp8"}
PIECES = {"long_prefill_token_threshold": 32}
"""Two query heads share a KV head here. FlashAttention 3 reads fp8 keys in blocks of 96 while no request of a step has
more than 64 query rows a KV head, and in longer ones otherwise. It rounds a block's probabilities to fp8 against the
largest score so far, so a token's output depends on its neighbours (`tile_size_fwd_sm90`, `use_one_mma_wg`)."""
ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
KEPT = {*ADAPTERS, *FP8_KEYS, *PIECES, "tensor_parallel_size", "enable_expert_parallel", "max_num_seqs", "dtype"}
KEPT |= {"quantization", "model_impl", "load_format"}
"""Arguments that the plain engine which a case is compared with has too."""
PROMPTS = ragged_prompts(64, VOCAB)
LENGTHS = [(192, 256, 320)[number % 3] for number in range(64)]  # tokens generated; 256 on average
POINTS = [(1, 1), (LAYERS // 4, 3), (LAYERS // 2, 5), (LAYERS - 1, 8)]
MIDDLE = (LAYERS // 2, 5)
OTHERS = ("mistral", "qwen3_moe", "mixtral", "llama4")
OTHER_DECODERS = ("OPTForCausalLM", "FalconForCausalLM", "Starcoder2ForCausalLM", "GPT2LMHeadModel")
"""Decoders with other parts than Llama's, under other names."""


def save_wide(_: Path, folder: Path) -> Path:
    """The architecture that the folder is named after, wide enough that every multiprocessor has a share of a layer."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4608, "num_attention_heads": 8}
    return save_tiny(folder.name, folder, **{**shape(folder.name), **sizes})


def save_several_positions(_: Path, folder: Path) -> Path:
    """Qwen2-VL on text at positions that are what they would be behind pictures: fewer than tokens, not alike."""
    from vllm.model_executor.models.qwen2_vl import Qwen2VLForConditionalGeneration

    def positions(self: Any, ids: list[int], pictures: Any) -> tuple[torch.Tensor, int]:
        place = torch.arange(len(ids))
        return torch.stack([place // 2, place // 2 + place % 3, place // 3]), len(ids) // 2 + 3 - len(ids)

    Qwen2VLForConditionalGeneration.get_mrope_input_positions = positions
    return save_with_heads_of_128(folder)


def save_with_pictures(_: Path, folder: Path) -> Path:
    """Qwen2-VL that is shown pictures; its processor is made to need no torchvision, in this process alone."""
    without_video_processor(SimpleNamespace(setattr=setattr), "Qwen2VL")
    return save_with_heads_of_128(folder)


def save_with_heads_of_128(folder: Path) -> Path:
    """Qwen2-VL, in its tower of vision too."""
    import architectures

    architectures.SHAPE.update(architectures.HEADS_OF_128)
    rope = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 10000.0}
    vision = {"embed_dim": 256, "hidden_size": 256}
    return save_with_several_positions(folder, vision=vision, rope_parameters=rope)


MADE = {
    "int4": save_quantised,
    "gptq": save_gptq,
    "awq": save_awq,
    "eyes": save_with_eyes,
    "wide": save_wide,
    "positions": save_several_positions,
    "pictures": save_with_pictures,
}
"""What is made of a model: "llama+int4" has its weights in 4 bits, "llama+eyes" is a Llama that sees pictures, and
"llama+wide" drafts by one kernel for all layers."""

Requests = tuple[list[list[int]], list[Any]]


def plain() -> Requests:
    """64 requests of mixed lengths: chunked prefill, prefix caching, joining and leaving."""
    return PROMPTS, [greedy(length) for length in LENGTHS]


def in_turn(kinds: list[dict[str, Any]]) -> Requests:
    """As plain, each request with one of several kinds of parameters."""
    return PROMPTS, [greedy(length, **kinds[number % len(kinds)]) for number, length in enumerate(LENGTHS)]


def full_models() -> Requests:
    """Some requests end at max_model_len, among others that go on."""
    long = [(prompt * MAX_LEN)[: MAX_LEN - 3 - 5 * number] for number, prompt in enumerate(PROMPTS[:8])]
    return [*long, *PROMPTS[8:24]], [greedy(64)] * 24


def company() -> Requests:
    """Greedy requests beside sampled ones, some asking for log-probabilities, some bound by a grammar."""
    from vllm.sampling_params import StructuredOutputsParams

    words = StructuredOutputsParams(regex=r"[a-f]{3}-[0-9]{20,40}")
    kinds = [greedy(96), greedy(96, temperature=0.8, seed=1), greedy(96, logprobs=3)]
    return PROMPTS, [*kinds, greedy(60, ignore_eos=False, detokenize=True, structured_outputs=words)] * 16


WISHES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"stop_token_ids": [7, 11], "ignore_eos": False},
    {"min_tokens": 24, "ignore_eos": False},
    {"stop": ["ab", "c"], "detokenize": True, "include_stop_str_in_output": True},
]
"""Penalties, stops and a least number of tokens, each beside requests without."""
OWN = [{"extra_args": wish} for wish in (None, {"selfspec_k": 0}, {"selfspec_k": 1}, {"selfspec_k": 3})]
OUT = {"extra_args": {"selfspec_k": 0}}
REPEATED = [(prompt[:20] * 9)[:120] if number % 2 else prompt for number, prompt in enumerate(PROMPTS)]
WITHOUT_PICTURES = ragged_prompts(64, 240)
REQUESTS: dict[str, Callable[[], Requests]] = {
    "plain": plain,
    "few": lambda: (PROMPTS[:8], plain()[1][:8]),  # for engines that run one at a time
    "wishes": lambda: in_turn(WISHES),
    "short": lambda: (WITHOUT_PICTURES, plain()[1]),  # without tokens that mean a picture
    "asleep": plain,  # and once more after a sleep at level 2
    "replaced": plain,  # and once more with the weights of another model
    "adapters": plain,  # alternating between requests without an adapter, and with one of two
    "pictures": lambda: (WITHOUT_PICTURES, plain()[1]),  # every second one shows a picture
    "full_models": full_models,
    "crowd": lambda: (ragged_prompts(256, VOCAB, seed=2), [greedy(48 + number % 32) for number in range(256)]),
    "company": company,
    "own": lambda: in_turn(OWN),  # opt out of drafts or want shorter ones, beside others
    # Every second prompt says the same again and again, so that requests with a match run beside others.
    "repeated": lambda: (REPEATED, plain()[1]),
    # Nobody wants drafts but the last eight, which run on when the others have ended.
    "opted_out": lambda: (PROMPTS, [greedy(96, **OUT)] * 56 + [greedy(320)] * 8),
}


@dataclass
class Case:
    """One engine, and what became of it."""

    model: str
    layer: int
    k: int
    requests: str = "plain"
    engine: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    compared: int = 0  # greedy requests
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0
    read_first: int = 0  # steps whose tokens were read before the next one was launched
    free_accepted: int = 0  # tokens that were copied from what a request had before
    joined: int = 0  # steps with a request in its prefill that were replayed as a full graph
    fused: tuple[int, ...] = ()  # numbers of tokens for which a draft step is one kernel
    copied: float | None = None  # bytes of the layers' copies for a weight of theirs, where a draft step is one kernel
    different: tuple[int, ...] = ()
    seconds: float = 0.0

    @property
    def name(self) -> str:
        changes = "".join(f" {key}={value}" for key, value in {**self.engine, **self.spec}.items())
        return f"{self.model} E={self.layer} k={self.k} {self.requests}{changes}"

    def passed(self) -> bool:
        """Drafts were made, some were accepted and some were not, both orders were had, and nothing greedy differs."""
        several_ranks = self.engine.get("tensor_parallel_size", 1) > 1
        # Grammars keep vLLM's order, and without asynchronous scheduling tokens are always read first.
        one_order = several_ranks or self.engine.get("async_scheduling") is False or self.requests == "company"
        orders = one_order or self.read_first > 0
        # Mixed prefill and decode batches are full graphs in compiled engines, but for pictures, and a crowd has more
        # tokens than the greatest graph.
        compiled = is_compiled(self) and not several_ranks
        graphs = self.joined > 0 or self.requests in ("pictures", "crowd") or not compiled
        # Engines for more requests than eight also have a kernel for more tokens.
        fewest = 8 if {**GPU, **self.engine}["max_num_seqs"] > 8 else 0
        one_kernel = max(self.fused, default=0) > fewest or not self.model.endswith("+wide")
        # A layout for each kernel, and where the target's weights have 8 bits the copies as they were made.
        layouts = 1 + (fewest > 0) + ("quantization" in self.engine)
        memory = self.copied is None or self.copied < 0.54 * layouts
        free = self.free_accepted > 0 or "free_drafts" not in self.spec
        refused = self.accepted < self.drafted or self.engine.get("load_format") == "dummy"
        rest = free and orders and graphs and one_kernel and memory
        return self.accepted > 0 and refused and rest and not self.different


def is_compiled(case: Case) -> bool:
    """Whether vLLM compiles the model of an engine; else it runs in CUDA graphs alone, or eagerly."""
    return case.engine.get("compilation_config") == COMPILED["compilation_config"]


def cases(tensor_parallel: int = 1) -> Iterator[Case]:
    """tensor_parallel: ranks of the engines; `report_cases` tells them so."""
    for model in ("llama", "qwen3"):
        for point in POINTS:
            yield Case(model, *point)
        for requests in ("full_models", "company"):
            yield Case(model, *MIDDLE, requests)
        yield Case(model, *MIDDLE, "company", spec={"draft_sample_method": "probabilistic"})
        yield Case(model, *MIDDLE, "crowd", engine=MANY)
        for more in (PREEMPTING, EAGER, {"async_scheduling": False}, COMPILED):
            yield Case(model, *MIDDLE, engine=more)
        yield Case(model, *MIDDLE, "adapters", engine=ADAPTERS)
        if tensor_parallel > 1:
            for kind in ("fp8", "int8"):
                yield Case(model, *MIDDLE, spec={"draft_weights": kind})
        else:
            for more in WAYS:
                yield Case(model, *MIDDLE, engine=more, spec={"draft_weights": "fp8"})
            for kind in ("int8", "int4"):
                yield Case(model, *MIDDLE, engine=COMPILED, spec={"draft_weights": kind})
            yield Case(model, LAYERS, 4, spec=INT4)
            for kind in ("int8", "int4"):  # one token at a time
                yield Case(model, LAYERS, 4, "few", engine={"max_num_seqs": 1}, spec={"draft_weights": kind})
    yield from one_kernel(tensor_parallel)
    yield from reach(tensor_parallel)
    yield from ranks(tensor_parallel)
    yield from views(tensor_parallel)
    yield from lengths(tensor_parallel)
    yield from free_drafts(tensor_parallel)
    for model in OTHERS:
        yield Case(model, *MIDDLE)
    for kind in ("fp8", "int8", "int4"):
        yield Case("mixtral", *MIDDLE, spec={"draft_weights": kind})
    for more in ({}, COMPILED):
        yield Case("qwen3_moe", *MIDDLE, engine=more, spec={"draft_weights": "fp8"})
    yield Case("deepseek_v2", *MIDDLE)
    for more in WAYS:
        yield Case("llama", *MIDDLE, engine={**more, "quantization": "fp8"})
        yield Case("llama+int4", *MIDDLE, engine=more)
        yield Case("llama+eyes", *MIDDLE, "pictures", engine=more)


def one_kernel(tensor_parallel: int = 1) -> Iterator[Case]:
    """Draft steps as one kernel: one for up to 8 tokens, one for up to 64; steps of more tokens are not."""
    if tensor_parallel > 1:
        return
    for model in ("llama+wide", "qwen3+wide"):
        for more in WAYS:
            yield Case(model, LAYERS, 4, "few", engine={**more, "max_num_seqs": 4}, spec=INT4)
        yield Case(model, LAYERS, 4, "few", engine={"max_num_seqs": 1}, spec=INT4)
        yield Case(model, LAYERS, 4, spec=INT4)
        yield Case(model, LAYERS, 4, spec={**INT4, **GATE})
        for more in ({}, COMPILED):  # how many tokens a step has chooses among the kernels and their layouts
            many = {**more, **MANY}
            for requests in ("plain", "crowd"):
                yield Case(model, LAYERS, 4, requests, engine=many, spec=INT4)
        yield Case(model, LAYERS, 4, "few", spec={**INT4, "draft_window": 48})


def reach(tensor_parallel: int = 1) -> Iterator[Case]:
    """Copies over checkpoints, caches, adapters and requests of other kinds."""
    for model in ("llama+int4", "llama+gptq"):
        yield Case(model, LAYERS, 4, spec=INT4)
    # In batch-invariant mode vLLM multiplies AWQ weights by a kernel for float16 alone, which copies on CUDA refuse.
    yield Case("llama+awq", *MIDDLE, engine={"dtype": "float16"})
    yield Case("llama", LAYERS, 4, engine={"quantization": "fp8"}, spec=INT4)
    yield Case("llama", LAYERS, 4, "wishes", spec=INT4)
    yield Case("llama", LAYERS, 4, "own", spec=INT4)
    yield Case("llama", LAYERS, 4, "adapters", engine=ADAPTERS, spec=INT4)
    yield Case("llama", LAYERS, 4, spec={**INT4, "draft_window": 48})
    yield Case("llama", LAYERS, 4, "replaced", engine={"enable_prefix_caching": False}, spec=INT4)
    yield Case("llama", LAYERS, 4, "asleep", engine={"enable_sleep_mode": True}, spec=INT4)
    if tensor_parallel == 1:
        yield Case("llama", LAYERS, 4, spec={**INT4, "draft_weights_path": FITTED})
    for kind in ("fp8", "int8"):
        yield Case("llama", LAYERS, 4, engine={"quantization": "fp8"}, spec={"draft_weights": kind})
    for name in OTHER_DECODERS:
        yield Case(name, 1, 3)
    # vLLM 0.32 has no parameters of the names under which it looks for a checkpoint's experts. With the weights that it
    # makes up every draft is accepted.
    yield Case("DbrxForCausalLM", 1, 3, engine={"load_format": "dummy"})
    for more in ({}, COMPILED):  # before the next model, which moves the positions of all that this process makes later
        yield Case("qwen2_vl+pictures", 2, 3, "pictures", engine={**more, **ONE_PICTURE})
    for more in ({}, COMPILED):
        yield Case("qwen2_vl+positions", 2, 3, "short", engine={**more, **NO_PICTURES})
    for spec in ({}, INT4):
        yield Case("llama", *MIDDLE, engine={"model_impl": "transformers"}, spec=spec)
    yield from fp8_keys(tensor_parallel)


def fp8_keys(tensor_parallel: int = 1) -> Iterator[Case]:
    """Keys and values in fp8, with prompts in pieces that leave FlashAttention 3 at one size of its blocks."""
    for spec in ({}, INT4):
        yield Case("llama", *MIDDLE, engine={**FP8_KEYS, **PIECES}, spec=spec)


def ranks(tensor_parallel: int = 1) -> Iterator[Case]:
    """What tensor-parallel ranks have to do alike: end the loop by gates and by its worth, on copies of their shares,
    and with experts that are divided among them. Those that share a plain engine are neighbours."""
    if tensor_parallel == 1:
        return
    yield Case("llama", *MIDDLE, spec=GATE)
    yield Case("llama", LAYERS, 4, spec={**INT4, **GATE})
    yield Case("llama", LAYERS, 4, spec={"draft_weights": "int8", **GATE})
    yield Case("llama", *MIDDLE, spec={"gate": "auto"})
    yield Case("qwen3_moe", *MIDDLE, engine={"enable_expert_parallel": True}, spec=GATE)
    yield Case("mixtral", LAYERS, 4, spec={**INT4, **GATE})
    yield Case("llama", LAYERS, 4, engine=COMPILED, spec={**INT4, **GATE})


def views(tensor_parallel: int = 1) -> Iterator[Case]:
    """Drafts without some of the layers or of the context, alone and with all that they combine with."""
    for model in ("llama", "qwen3"):
        for more in WAYS:
            yield Case(model, LAYERS, 4, engine=more, spec={"skip_layers": "1,4-5"})
        yield Case(model, LAYERS, 4, engine=COMPILED, spec={"skip_layers": "2", **INT4})
        yield Case(model, LAYERS, 4, spec={"skip_layers": "0", **GATE})
    for model in ("mixtral", "deepseek_v2"):
        yield Case(model, LAYERS, 4, spec={"skip_layers": "2"})
    for more in WAYS:
        yield Case("llama", *MIDDLE, engine=more, spec={"draft_window": 32})
        yield Case("llama", LAYERS, 4, engine=more, spec={"draft_context": "blocks:64", **INT4})
    yield Case("qwen3", LAYERS, 4, engine=COMPILED, spec={"draft_window": 48, **INT4})
    yield Case("deepseek_v2", *MIDDLE, spec={"draft_window": 32})
    for kind in ("int8", "int4"):
        yield Case("deepseek_v2", LAYERS, 4, spec={"draft_weights": kind})
    for model in ("llama", "mixtral"):
        yield Case(model, LAYERS, 4, spec={**INT4, **GATE})
    if tensor_parallel == 1:
        yield Case("llama", LAYERS, 5, spec={**INT4, "length_table": TABLE})


TABLE = "1:5 4:2 4@200:5 4@400:0 10:0"
"""Draft lengths for 16 requests at once: the batch of the tests passes through all of them as it shrinks."""


def lengths(tensor_parallel: int = 1) -> Iterator[Case]:
    """Draft lengths by load, context, request and measured times; the widths of verify passes change on the way."""
    table, auto = {"length_table": TABLE}, {"gate": "auto"}
    for more in ({}, PREEMPTING, COMPILED, {"async_scheduling": False}, EAGER):
        yield Case("llama", *MIDDLE, engine=more, spec=table)
    for requests in ("own", "opted_out"):
        yield Case("llama", *MIDDLE, requests)
        yield Case("llama", *MIDDLE, requests, engine=PREEMPTING, spec={**table, **auto})
    gate = {"gate": "maxp", "tau": 0.3, "length_table": "1:5 4:3 10:5"}
    yield Case("llama", *MIDDLE, "own", spec=gate)
    yield Case("qwen3", 1, 5, spec=auto)
    yield Case("qwen3", *MIDDLE, "company", spec={**table, "draft_sample_method": "probabilistic"})


def free_drafts(tensor_parallel: int = 1) -> Iterator[Case]:
    """Drafts from what a request had before, alone and with all that they combine with; wider than k and narrower."""
    free = {"free_drafts": 12}
    for more in ({}, COMPILED):
        yield Case("llama", *MIDDLE, "repeated", engine=more, spec={"draft_weights": "none", **free})
    for more in WAYS:
        yield Case("llama", *MIDDLE, "repeated", engine=more, spec=free)
    for spec in (
        {"free_drafts": 3},
        {"gate": "maxp", "tau": 0.3, **free},
        {"length_table": TABLE, "gate": "auto", **free},
        {"draft_window": 32, **free},
    ):
        yield Case("llama", *MIDDLE, "repeated", spec=spec)
    yield Case("qwen3", LAYERS, 4, "repeated", engine=PREEMPTING, spec={**INT4, **free})
    yield Case("qwen3", LAYERS, 4, "few", engine={"max_num_seqs": 1}, spec={**INT4, **free})
    yield Case("llama", *MIDDLE, "own", spec=free)
    for method in ("greedy", "probabilistic"):
        yield Case("llama", *MIDDLE, "company", spec={**free, "draft_sample_method": method})


@cache
def model_dir(model: str) -> Path:
    """The folder of a model, which is made if it is not there yet: that keeps all of a machine's processors busy."""
    if Path(model).is_dir():
        return Path(model)
    model, _, made = model.partition("+")
    if made:
        base = model_dir(model) if model in ARCHITECTURES else Path()
        return MADE[made](base, Path(tempfile.mkdtemp(prefix=f"selfspec-{made}-")) / model)
    if model.endswith(("ForCausalLM", "LMHeadModel")):
        import architectures

        # With a sliding window FlashAttention 3 is not batch-invariant.
        architectures.SHAPE.update({**architectures.HEADS_OF_128, "sliding_window": None})
        architectures.save(model, folder := Path(tempfile.mkdtemp(prefix=f"selfspec-{model}-")))
        return folder
    folder = save_tiny(model, Path(tempfile.mkdtemp(prefix=f"selfspec-{model}-")), **shape(model))
    save_tokenizer(folder)
    return folder


@contextmanager
def engine(case: Case, drafting: bool) -> Iterator[Live]:
    talks = case.requests in ("company", "pictures", "wishes", "short")
    changes, spec = {**GPU, **case.engine, "skip_tokenizer_init": not talks}, dict(case.spec)
    if not drafting:  # vLLM's memory pool that can be given away is for one engine of a process
        changes.pop("enable_sleep_mode", None)
    if drafting and spec.get("draft_weights_path") == FITTED:
        spec["draft_weights_path"] = str(fitted(case.model))
    with live(model_dir(case.model), layer_skip(case.layer, case.k, **spec) if drafting else None, **changes) as it:
        assert it.llm.llm_engine.vllm_config.use_v2_model_runner, "this is a test of the V2 model runner"
        yield it


def generated(it: Live, case: Case) -> list[Any]:
    """One finished request a prompt."""
    prompts, params = REQUESTS[case.requests]()
    if case.requests == "replaced":
        other = save_tiny(case.model, Path(tempfile.mkdtemp(prefix="selfspec-other-")), **shape(case.model), seed=1)
        before = it.generate(prompts, params)
        it.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        return before + it.generate(prompts, params)
    if case.requests == "asleep":
        before = it.generate(prompts, params)
        if not it.llm.llm_engine.vllm_config.model_config.enable_sleep_mode:
            return before + it.generate(prompts, params)
        it.llm.sleep(level=2)
        it.llm.wake_up()
        it.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model_dir(case.model))})
        return before + it.generate(prompts, params)
    if case.requests not in ("adapters", "pictures"):
        return it.generate(prompts, params)
    inputs: list[dict[str, Any]] = [{"prompt_token_ids": prompt} for prompt in prompts]
    if case.requests == "pictures":
        marks, size = ((IMAGE,), ()) if case.model.endswith("+eyes") else (SEES, (112, 280))
        for each, picture in zip(inputs[::2], pictures(len(inputs) // 2, *size), strict=True):
            each |= {"prompt_token_ids": [1, *marks, *each["prompt_token_ids"]], "multi_modal_data": {"image": picture}}
        return it.llm.generate(inputs, params, use_tqdm=False)
    names = [adapters(case.model)[number % 3] for number in range(len(prompts))]
    return it.llm.generate(inputs, params, lora_request=names, use_tqdm=False)


@cache
def fitted(model: str) -> Path:
    """A file of copies in 4 bits of all layers, fitted to what they see of some prompts."""
    file = Path(tempfile.mkdtemp(prefix="selfspec-fitted-")) / "copies.safetensors"
    with live(model_dir(model), **{**GPU, "enforce_eager": True}) as it:
        it.call("early_exit_observe")
        it.generate(PROMPTS[:32], greedy(64))
        it.call("early_exit_fit_weights", str(file), "int4", {"by": "a test"})
    return file


@cache
def adapters(model: str) -> list[Any]:
    """No adapter, and two."""
    from vllm.lora.request import LoRARequest

    root = Path(tempfile.mkdtemp(prefix="selfspec-adapters-"))
    folders = [save_adapter(root / str(number), model_dir(model), number) for number in (1, 2)]
    return [None, *(LoRARequest(folder.name, int(folder.name), str(folder)) for folder in folders)]


_known: dict[str, list[Any]] = {}


def baseline(case: Case) -> list[Any]:
    """What the plain engine gives: computed once for each model, engine and set of requests."""
    settings = {key: value for key, value in case.engine.items() if key in KEPT}
    key = json.dumps([case.model, case.requests, settings, is_compiled(case)])
    if key not in _known:
        with engine(case, drafting=False) as it:
            _known[key] = generated(it, case)
    return _known[key]


def run(case: Case) -> Case:
    """Fill in `case` from a drafting engine, in which tokens are read before the next launch in alternating steps."""
    from selfspec_cli.vllm_plugin.v2.step_order import reader_of

    expected = baseline(case)
    start = time.perf_counter()
    with engine(case, drafting=True) as it:
        orders, reader = alternating(), reader_of(it.llm.llm_engine.engine_core.engine_core)
        if reader is not None:
            reader._orders = orders
        graphs = graphs_of(it)
        outputs = generated(it, case)
        case.read_first, case.joined = orders.asked // 2, graphs.get("FULL joined", 0)
        counts = it.counts()
        case.fused, case.copied = fused_tokens(it), copied_bytes(it)
        case.free_accepted = it.call("early_exit_counters")["free_accepted"]
        case.preempted = it.metric("num_preemptions")
    case.seconds = round(time.perf_counter() - start, 1)
    asked = REQUESTS[case.requests]()[1]
    sure = [index for index in range(len(outputs)) if asked[index % len(asked)].temperature == 0]
    got, want = (tokens([results[index] for index in sure]) for results in (outputs, expected))
    case.compared, case.tokens = len(got), sum(map(len, got))
    case.drafted, case.accepted = counts.drafted, counts.accepted
    case.different = tuple(sure[index] for index in differing(got, want))
    for index in differing(got, want)[:3]:
        print(f"    request {sure[index]}: {first_difference(got[index], want[index])}")
    return case


def runner_of(it: Live) -> Any:
    """The model runner of an engine; None where its worker is another process."""
    worker = getattr(it.llm.llm_engine.engine_core.engine_core.model_executor, "driver_worker", None)
    return getattr(getattr(worker, "worker", worker), "model_runner", None)


def fused_tokens(it: Live) -> tuple[int, ...]:
    """Numbers of tokens for which an engine's draft steps are one kernel; none where its worker is another process."""
    step = getattr(getattr(runner_of(it), "speculator", None), "fused_step", None)
    return () if step is None else step.tokens


def copied_bytes(it: Live) -> float | None:
    """Bytes of all copies of an engine's layers for each of their weights; None where no kernel is for all layers."""
    from selfspec_cli.vllm_plugin.weights.copied import CopiedWeight

    speculator = getattr(runner_of(it), "speculator", None)
    step = getattr(speculator, "fused_step", None)
    if step is None:
        return None
    beside = [part for part in speculator.model.modules() if isinstance(part, CopiedWeight)]
    copies = [step.copies, *(tensor for part in beside for tensor in part.parameters())]
    sizes = (16 * 64 * step.shape.tiles[name] * groups for name, groups in step.shape.groups.items())
    return sum(tensor.nbytes for tensor in copies) / (step.shape.layers * sum(sizes))


def first_difference(got: list[int], want: list[int]) -> str:
    unequal = (at for at, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1])
    at = next(unequal, min(len(got), len(want)))
    return f"first differs at token {at} of {len(want)}: {got[at : at + 4]}, not {want[at : at + 4]}"


def watched(case: Case, steps: int = 100) -> dict[str, int]:
    """Run `propose` where any wait for the device is an error; counts its calls and the allocations that it made."""
    seen = {"rounds": 0, "allocations": 0}
    with engine(case, drafting=True) as it:
        it.generate(PROMPTS[:16], greedy(32))  # kernels compile on their first use
        speculator = runner_of(it).speculator
        propose = speculator.propose

        def watch(*args: Any, **kwargs: Any) -> Any:
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            torch.cuda.set_sync_debug_mode("error")
            try:
                return propose(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                seen["rounds"] += 1
                seen["allocations"] += torch.cuda.memory_stats()["allocation.all.allocated"] - before

        speculator.propose = watch
        it.generate(PROMPTS[:16], greedy(steps))
    return seen


def graphs_of(it: Live) -> dict[str, int]:
    """Steps of an engine from now on, by the kind of graph that they replay and the tokens of each request: "joined"
    where one is in its prefill, None where they differ else. Empty for an engine whose worker is in another process."""
    found, runner = dict[str, int](), runner_of(it)
    if runner is None:
        return found
    dispatch = runner.cudagraph_manager.dispatch

    def watch(num_reqs: int, num_tokens: int, uniform: int | None, *args: Any, **kwargs: Any) -> Any:
        chosen = dispatch(num_reqs, num_tokens, uniform, *args, **kwargs)
        joined = uniform is None and kwargs.get("max_query_len", 0) is None
        name = f"{chosen.cg_mode.name} {'joined' if joined else uniform}"
        found[name] = found.get(name, 0) + 1
        return chosen

    runner.cudagraph_manager.dispatch = watch
    return found


GATED = [
    Case("llama", *MIDDLE),
    Case("qwen3", *MIDDLE),
    Case("llama", *MIDDLE, spec={"draft_sample_method": "probabilistic"}),
    Case("llama", *MIDDLE, engine=EAGER),
    Case("llama", *MIDDLE, engine=COMPILED),
]


def gated(case: Case, requests: str = "plain") -> dict[str, dict[str, int]]:
    """Every gate on one live engine, recorded, and last a gate and draft length that change between any two steps.

    different: outputs that are not the baseline's. places: verified; drafted: of these, places that held a draft.
    closed: rounds that the gate ended. recorded, recorded_accepted: tokens in the record."""
    found = {}
    expected = tokens(baseline(case))
    with engine(case, drafting=True) as it:
        for gate in [*GATES, "changing"]:
            before, own = it.counts(), it.call("early_exit_counters")
            it.call("early_exit_record", True)
            if gate == "changing":
                outputs = changing(it, case.k)
            else:
                it.call("early_exit_set_gate", gate, GATES[gate])
                outputs = tokens(it.generate(*plain()))
            made, counted = it.counts() - before, it.call("early_exit_counters")
            log = DraftLog.from_plain(it.call("early_exit_recorded"), case.k)
            found[gate] = {
                "different": len(differing(outputs, expected)),
                "places": made.drafted,
                "drafted": counted["drafted"] - own["drafted"],
                "accepted": made.accepted,
                "closed": counted["gate_ended"] - own["gate_ended"],
                "recorded": int(log.drafted.sum()),
                "recorded_accepted": int(log.accepted.sum()),
            }
            print(f"    {gate}: {found[gate]}", flush=True)
    return found


def changing(it: Live, k: int) -> list[list[int]]:
    """Gate, threshold and draft length change between any two steps of the engine."""
    settings, lengths = cycle(CHANGING), cycle(range(k, -1, -1))

    def change(_: list[str]) -> None:
        it.call("early_exit_set_gate", *next(settings))
        it.call("early_exit_set_draft_length", next(lengths))

    outputs = it.step_through(*plain(), change)
    it.call("early_exit_set_draft_length", k)
    return tokens(outputs)


def sound(row: dict[str, int], gate: str, k: int) -> bool:
    """Nothing differs, drafts were made, some accepted and some not, the gate did close, and the record agrees."""
    # With async scheduling a request is verified once more before it is known to have ended: the record sees that
    # round, vLLM's counters do not. Our counters also hold drafts that no verify pass came to see.
    accepted = 0 <= row["recorded_accepted"] - row["accepted"] <= k * len(PROMPTS)
    counts = accepted and 0 < row["recorded_accepted"] < row["recorded"] <= row["drafted"]
    stopped = gate == "none" or (0 < row["closed"] and row["recorded"] < row["places"])
    return not row["different"] and counts and stopped


if pytest is not None:

    @pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
    def test_greedy(case):
        done = run(case)
        assert done.passed(), done

    @pytest.mark.parametrize("case", GATED, ids=lambda case: case.name)
    def test_gates(case):
        found = gated(case)
        assert all(sound(row, gate, case.k) for gate, row in found.items()), found

    def test_steps_of_every_width_replay_a_full_graph():
        with engine(Case("llama", *MIDDLE, spec={"length_table": TABLE}), drafting=True) as it:
            found = graphs_of(it)
            it.generate(*plain())
        assert {"FULL 1", "FULL 3", "FULL 6"} <= found.keys(), found
        assert not {"NONE 1", "NONE 3", "NONE 6"} & found.keys(), found

    @pytest.mark.parametrize(
        "spec",
        [
            {},
            {"length_table": TABLE, "gate": "auto"},
            {"draft_window": 32},
            {"draft_context": "blocks:64"},
            {"free_drafts": 12},
            {"free_drafts": 12, "draft_sample_method": "probabilistic"},
        ],
    )
    def test_propose_waits_for_nothing_and_allocates_nothing(spec):
        seen = watched(Case("llama", *MIDDLE, spec=spec))
        assert seen["rounds"] > 10
        assert seen["allocations"] == 0


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--only", nargs="+", default=[], metavar="SUBSTRING", help="cases whose name has one of them")
    options.add_argument(
        "--group",
        default="cases",
        choices=("cases", "one_kernel", "reach", "fp8_keys", "ranks", "free_drafts", "views", "lengths"),
    )
    options.add_argument("--part", default="1/1", metavar="I/N", help="the Ith of N parts of the cases")
    options.add_argument("--tensor-parallel", type=int, default=1)
    options.add_argument("--gates", action="store_true")
    options.add_argument("--out", type=Path, default=Path("lossless.json"))
    chosen = options.parse_args()
    if chosen.gates:
        return report_gates(chosen.only, chosen.out)
    return report_cases(chosen.group, chosen.only, chosen.part, chosen.tensor_parallel, chosen.out)


def part_of(all_cases: Iterable[Case], part: str) -> list[Case]:
    """The Ith of N runs of neighbouring cases ("I/N"); neighbours often share the plain engine that they need."""
    number, count = map(int, part.split("/"))
    listed = list(all_cases)
    first, end = (len(listed) * at // count for at in (number - 1, number))
    return listed[first:end]


def wanted(case: Case, only: list[str]) -> bool:
    """Whether the name of a case has one of the substrings, or all cases are wanted."""
    return not only or any(part in case.name for part in only)


def save(file: Path, found: dict[str, Any]) -> None:
    """What was found so far: a machine that is lent is also taken back."""
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def report_cases(group: str, only: list[str], part: str, tensor_parallel: int, out: Path) -> int:
    shared = {"tensor_parallel_size": tensor_parallel} if tensor_parallel > 1 else {}
    made = (replace(case, engine={**shared, **case.engine}) for case in globals()[group](tensor_parallel))
    chosen = part_of((case for case in made if wanted(case, only)), part)
    spec = {"free_drafts": 12} if group == "free_drafts" else {}
    whole = group in ("cases", "free_drafts") and not shared and not only
    waits = watched(Case("llama", *MIDDLE, spec=spec)) if whole and part.startswith("1/") else None
    return report_each(chosen, out, not (waits or {}).get("allocations"), propose=waits)


def report_each(chosen: Iterable[Case], out: Path, passed: bool, **more: Any) -> int:
    """Run and report cases. passed: whether what was tried before them did; more: what it found."""
    done: list[Case] = []
    broken: dict[str, str] = {}
    for case in chosen:
        try:
            done.append(run(case))
        except Exception as error:  # the next case is worth running all the same
            passed, broken[case.name] = False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            print(f"FAIL {case.name}: {broken[case.name]}", flush=True)
            traceback.print_exc()
        else:
            passed &= case.passed()
            verdict = "ok  " if case.passed() else "FAIL"
            counted = f"{case.drafted} drafted, {case.accepted} accepted, {case.preempted} preempted"
            differ = f"{len(case.different)} of {case.compared} differ"
            print(f"{verdict} {case.name}: {counted}, {differ}, {case.seconds} s", flush=True)
        save(out, {"passed": passed, **more, "broken": broken, "cases": [asdict(each) for each in done]})
    return 0 if passed else 1


def report_gates(only: list[str], out: Path) -> int:
    found: dict[str, dict[str, dict[str, int]]] = {}
    passed = True
    for case in GATED:
        if wanted(case, only):
            found[case.name] = gated(case)
            passed &= all(sound(row, gate, case.k) for gate, row in found[case.name].items())
            save(out, {"passed": passed, "gates": found})
    return 0 if passed else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # ranks of other processes may take long to end
