"""Compiles kernels for an H100, which needs none, and looks at their PTX: run by test_v2_kernels.py.

Names of functions below are the arguments."""

import contextlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.cache import FileCacheManager

from selfspec_cli.vllm_plugin.v2.round_setup import Verdict
from selfspec_cli.vllm_plugin.v2.state import GateRule, Limits, Matches, Progress, RoundInputs, Worth

H100 = GPUTarget("cuda", 90, 32)
WIDE = {"positions", "sample_positions", "idx_mapping", "requests", "draft_tokens"}
WIDE |= {"step", "counts", "last_sampled", "found"}
REAL = {"row_limits", "own_limits", "rates", "rule", "own", *Worth._fields}


def typed(kind: Any) -> Any:
    """The tuple `kind` with the type of a pointer in the place of each tensor."""
    return kind(*("*i64" if name in WIDE else "*fp32" if name in REAL else "*i32" for name in kind._fields))


LISTS = {
    "inputs": typed(RoundInputs),
    "progress": typed(Progress),
    "gate": typed(GateRule),
    "budget": typed(Limits),
    "worth": typed(Worth),
    "verdict": typed(Verdict),
    "matches": typed(Matches),
}
"""Named tuples that kernels take."""


def of(kind: str, names: str) -> dict[str, str]:
    """The same type for each of some parameters."""
    return dict.fromkeys(names.split(), kind)


def compiled(
    kernel: Any, types: dict[str, Any], constants: dict[str, Any], whole: Iterable[str] = (), **options: Any
) -> tuple[Any, str]:
    """A kernel and its PTX. types: of parameters; i32 where none is given. whole: parameters that 16 divides."""
    known = LISTS | types
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in kernel.arg_names}
    places = [kernel.arg_names.index(name) for name in whole]
    attributes = {(place,): [["tt.divisibility", 16]] for place in places}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=H100, options=options)
    return made, made.asm["ptx"]


def gates() -> None:
    """More gates add no reduction. Prints how many there are, and how often threads wait for each other."""
    from selfspec_cli.early_exit.gates import device_features
    from selfspec_cli.vllm_plugin.v2.kernels import _end_step

    types = of("*i64", "tokens vocab_ids") | of("*fp32", "parts logged") | of("*i32", "indices lengths")
    for free in (False, True):
        constants = {"K": 5, "GREEDY": True, "MAPPED": False, "BLOCKS": 64, "FREE": free, "MEASURES": free, "PLACES": 8}
        _, ptx = compiled(_end_step, types, constants)
        if not free:
            print(len(device_features()), ptx.count("bar.sync"))


def begin() -> None:
    from selfspec_cli.vllm_plugin.v2.round_setup import _begin_round

    for measures in (False, True):
        constants = {"K": 5, "ROWS": 512, "LIMITS": measures, "FREE": measures, "MEASURES": measures}
        compiled(_begin_round, {"lengths": "*i32", "step_value": "fp32"}, constants)


def matching() -> None:
    from selfspec_cli.vllm_plugin.v2.matches import _certain, _judge, _look_up
    from selfspec_cli.vllm_plugin.v2.worth import _judge_confidence, _turn

    types = of("*fp32", "statistics own") | of("*i64", "counts draft_tokens") | of("*i32", "num_sampled slots lengths")
    types |= {"cost": "fp32", "logits": "*bf16"}
    atomic = {_look_up: 1, _certain: 0, _turn: 0}
    atomic |= {_judge: 3, _judge_confidence: 4}  # counters and rows that go on; what stood and what was judged
    for kernel, additions in atomic.items():
        constants = {"BLOCK": 1024, "K": 16, "PLACES": 32, "ROWS": 32, "FREE": True, "MEASURES": True, "ALONE": False}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        _, ptx = compiled(kernel, types, constants)
        assert (ptx.count(".local"), ptx.count("atom")) == (0, additions), kernel


def attention() -> None:
    """It multiplies on tensor cores, spills nothing, and counts programs only where several share a request."""
    from selfspec_cli.vllm_plugin.attention.one_query import _attend

    types = of("*bf16", "query key value out keys values") | of("*i32", "table seq_lens arrived")
    types |= of("*fp32", "partial found") | {"slots": "*i64", "scale": "fp32"}
    for keys, warps, stages, splits in ((256, 8, 1, 32), (128, 4, 2, 1)):
        constants = {"DIM": 128, "SHARED": 4, "ROWS": 16, "PAGE": 16, "KEYS": keys, "SPLITS": splits, "EARLY": True}
        whole = [name for name in _attend.arg_names if name not in {"scale", "table_columns", *constants}]
        options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
        kernel, ptx = compiled(_attend, types, constants, whole, **options)
        assert ptx.count("mma.sync") >= 16 and ptx.count(".local") == 0
        assert (ptx.count("atom") > 0) == (splits > 1)
        assert kernel.metadata.shared < 227 * 2**10


def several() -> None:
    """Weights are read 16 bytes at a time and in no other way, and nothing passes through shared memory or spills."""
    from selfspec_cli.vllm_plugin.weights.one_token import _rows

    types = of("*bf16", "bias out") | of("*i32", "rounded words") | {"factors": "*fp32", "scales": "*fp16"}
    for bits in (4, 8):
        constants = {"TOTAL": 64, "BIASED": False, "BITS": bits, "ROWS": 2, "GROUPS": 32, "REST": 1, "ASM": True}
        whole = [*types, "rows"]
        kernel, ptx = compiled(_rows, types, constants | {"EARLY": True}, whole, num_warps=1, launch_pdl=True)
        hint = "evict_first.L2::cache_hint"
        assert ptx.count(hint + ".v4.b32") == 2 * bits  # two rows of 512 * bits bytes, by 32 lanes
        assert not ptx.count(hint + ".b32") + kernel.metadata.shared + ptx.count(".local")


def rounding() -> None:
    """Nothing spills, and of a norm only its weight is read before the kernel in front has ended."""
    from selfspec_cli.vllm_plugin.weights.rounding import _activate, _add_and_norm

    types = of("*bf16", "x residual weight normed left activated")
    types |= {"rounded": "*i32", "factors": "*fp32", "epsilon": "fp32"}
    for kernel, groups, warps, reads in ((_add_and_norm, 64, 8, [8, 16]), (_activate, 8, 2, [0, 16])):
        constants = {"TOKENS": 8, "HALVES": True, "GROUPS": groups, "EARLY": True}
        pointers = [name for name in kernel.arg_names if types.get(name, "")[:1] == "*"]
        _, ptx = compiled(kernel, types, constants, pointers, num_warps=warps, launch_pdl=True)
        loads = [len(re.findall(r"ld\.global", part)) for part in ptx.split("griddepcontrol.wait", 1)]
        assert ptx.count(".local") == 0 and loads == reads, kernel


def few() -> None:
    """Weights go from memory to tensor cores 16 or 8 bytes at a time, nothing passes through shared memory but the sums
    of warps, and nothing spills."""
    from selfspec_cli.vllm_plugin.weights.few_tokens import _some_rows

    types = of("*bf16", "bias out") | of("*i8", "rounded words") | of("*fp32", "factors partial")
    types |= {"scales": "*fp16", "arrived": "*i32"}
    for bits, loads in ((4, ".v2.b32"), (8, ".v4.b32")):
        constants = {"BITS": bits, "BIASED": True, "WHOLE": True, "ROWS": 16, "TOKENS": 8, "WARPS": 4, "ACROSS": 1}
        constants |= {"AT_ONCE": 3, "LOOPS": False, "PARTS": 1, "ASM": True, "EARLY": True}
        kernel, ptx = compiled(_some_rows, types, constants, types, num_warps=4, num_stages=1, launch_pdl=True)
        assert (ptx.count("mma.sync"), ptx.count(".local")) == (6, 0)
        assert ptx.count("evict_first.L2::cache_hint" + loads) >= 6  # of weights: three groups of 16 rows
        assert kernel.metadata.shared == 4 * 16 * 8 * 4


def shorten() -> None:
    """All is read before it is written: a row moves within itself, and a thread may overwrite what another has to
    read."""
    from selfspec_cli.vllm_plugin.contexts.window import _shorten

    types = of("*i32", "table seq_lens left_out")
    _, ptx = compiled(_shorten, types, {"BLOCK_SIZE": 16, "KEPT": 512})  # more blocks than threads
    places = ptx.rindex("ld.global"), ptx.index("bar.sync"), ptx.rindex("bar.sync"), ptx.index("st.global")
    assert places == tuple(sorted(places))


def choose() -> None:
    """As `shorten` of the table; the products of the keys are on tensor cores."""
    from selfspec_cli.vllm_plugin.contexts.blocks import _choose, _weigh

    types = of("*i32", "table seq_lens left_out ends rejected") | of("*bf16", "queries cache")
    types |= {"weights": "*fp32", "scale": "fp32"}
    weighing = {"PAGE": 16, "KEYS": 16, "DIM": 128, "DIMS": 128, "SHARED": 6, "ROWS": 16, "BLOCKS": 8}
    for kernel, constants in ((_choose, {"PAGE": 16, "COLUMNS": 2048}), (_weigh, weighing)):
        _, ptx = compiled(kernel, types, constants)
        assert (ptx.count("mma.sync") > 0) == (kernel is _weigh)
        if kernel is _choose:
            read = ptx.rindex("ld.global")
            assert read < ptx.index("bar.sync", read) < ptx.index("st.global")


# ---- compiled ahead, on a device that launches nothing ---------------------------------------------------------------

launched: list[Any] = []
made: list[str] = []
logged: list[str] = []


class Device:
    load_binary = staticmethod(lambda *_: (0, 0, 0, 0, 1024))
    unload_module = staticmethod(lambda *_: None)
    get_device_properties = staticmethod(lambda _: {"max_shared_mem": 232448})


class Driver:
    utils = Device()
    get_current_target = staticmethod(lambda: H100)
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda _: 0)
    launcher_cls = staticmethod(lambda *_: lambda *arguments, **_: launched.append(arguments))


class FullDisk(FileCacheManager):
    def put(self, *_, **more):
        raise OSError(28, "No space left on device")


def ahead() -> None:
    """What is compiled ahead is not compiled when it is launched, and each kernel once: 4 and 8 tokens have the same
    product here. It ends with the block that it is beside where that raises, and a full disk is a warning; either way a
    launch compiles what it does not find."""
    from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
    from selfspec_cli.vllm_plugin.weights import copied, lowbit

    driver.set_active(Driver())
    knobs.runtime.jit_post_compile_hook = lambda **more: made.append(more["fn"].name.rpartition(".")[2])
    copied.kernels_of = lambda *_: lowbit
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("vllm.selfspec").addHandler(handler)

    def copy(bits: int, rows: int, columns: int) -> Any:
        return copied.CopiedWeight(DRAFT_WEIGHTS[f"int{bits}"], torch.randn(rows, columns).bfloat16())

    def beside(one: Any, processors: int, block: Any = lambda: None) -> None:
        made.clear()
        os.sched_getaffinity = lambda _: range(processors)
        layer = torch.nn.Module()
        layer.quant_method, layer.copy_of_weight = copied.CopiedLinear(), one
        with lowbit.compiled_beside(layer, None, 32, SimpleNamespace(type="cuda"), 1):
            block()

    def found(one: Any, *numbers: int) -> tuple[int, list[str], int]:
        """How many kernels had been compiled; which products are now that they are launched; and all launches."""
        before, made[:], launched[:] = len(made), [], []
        for tokens in numbers:
            one(torch.randn(tokens, one.scales.shape[1] * 64).bfloat16())
        return before, sorted(set(made) - {"_round"}), len(launched)

    def fail() -> None:
        raise MemoryError("the layers do not fit")

    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        several = copy(4, 2048, 512)
        beside(several, processors=16)
        assert found(several, 1, 2, 5, 12, 16, 17, 32) == (4, [], 14) and not logged
        ended = copy(8, 2048, 512)
        with contextlib.suppress(MemoryError):
            beside(ended, processors=1, block=fail)
            raise AssertionError("the block did not fail")
        before, *rest = found(ended, 32)
        assert before < 4 and rest == [["_some_rows"], 2] and not logged
        knobs.cache.manager_class, no_room = FullDisk, copy(4, 512, 8192)
        beside(no_room, processors=4)
        knobs.cache.manager_class = FileCacheManager
        assert found(no_room, 32) == (0, ["_some_rows"], 2)
        assert logged == [
            "draft kernels: 5 could not be compiled ahead, and will be where they are first launched "
            "(OSError: [Errno 28] No space left on device)"
        ]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
