"""Runs kernels_interpreted.py in a process of its own, because Triton decides when it is imported whether to interpret;
and compiles the kernels for a GPU, which needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
PACKAGES = HERE.parent / "packages"
MARK = "printed by "
HAS_VLLM = find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")  # and is not imported here


def run(*command: str, packages: tuple[str, ...] = (), **environment: str) -> str:
    """What Python prints, with some of the folders of tests/packages installed."""
    paths = [str(PACKAGES / name) for name in packages] + [str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths), **environment}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def interpreted(*files: str) -> str:
    """What pytest prints of some files of this folder, in one process, for importing PyTorch takes longer than most."""
    return pytest_interpreted("-q", *(str(HERE / f"{name}_interpreted.py") for name in files))


def pytest_interpreted(*words: str, packages: tuple[str, ...] = ()) -> str:
    return run("-m", "pytest", "-p", "quick_interpreter", *words, packages=packages, TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    """What the programs below print, by name. All of them run in one process: importing Triton and PyTorch takes longer
    than to compile."""
    programs = {
        "ROUND": ROUND,
        "SEVERAL": SEVERAL,
        "FEW": FEW,
        "SHORTEN": SHORTEN,
        "CHOOSE": CHOOSE,
        "BEGIN": BEGIN,
        "MATCHING": MATCHING,
        "COMPILE": COMPILE,
        "AHEAD": AHEAD,
    }
    if HAS_VLLM:
        programs["ATTENTION"] = ATTENTION
    printed = run("-c", "".join(f"print('{MARK}{name}')\n{program}\n" for name, program in programs.items()))
    return {name: text for name, _, text in (part.partition("\n") for part in printed.split(MARK)[1:])}


def test_the_kernels_how_much_is_drafted_and_every_setting_of_a_kernel_in_tritons_interpreter():
    assert " passed" in interpreted("kernels", "round_setup", "matches")


@needs_vllm
def test_what_imports_vllm_in_tritons_interpreter():
    """The speculator, the draft's attention, and products with integer copies in a compiled layer."""
    assert " passed" in interpreted("speculator", "attention", "lowbit", "rounding")


def test_norms_and_activations_that_round_compile_for_cuda(compiled):
    """Nothing spills, and of a norm only its weight is read before the kernel in front has ended."""
    for line in compiled["ROUND"].splitlines():
        name, spilt, before, after = line.split()
        assert int(spilt) == 0
        assert (int(before), int(after)) == ((8, 16) if name == "_add_and_norm" else (0, 16)), name


def test_several_rows_of_integer_copies_compile_for_cuda(compiled):
    """Weights are read 16 bytes at a time and in no other way, and nothing passes through shared memory or spills."""
    for line in compiled["SEVERAL"].splitlines():
        bits, wide, narrow, shared, spilt = (int(word) for word in line.split())
        assert wide == 2 * bits and not narrow + shared + spilt, line  # two rows of 512 * bits bytes, by 32 lanes


def test_few_tokens_times_integer_copies_compile_for_cuda(compiled):
    """Weights go from memory to tensor cores 16 or 8 bytes at a time, nothing passes through shared memory but the sums
    of warps, and nothing spills."""
    for line in compiled["FEW"].splitlines():
        bits, products, loads, spilt, shared, sums = (int(word) for word in line.split())
        assert products == 6 and spilt == 0
        assert loads >= 6  # of weights: three groups of 16 rows
        assert shared == sums, bits


@needs_vllm
def test_the_drafts_attention_compiles_for_cuda(compiled):
    """It multiplies on tensor cores, spills nothing, and counts programs only where several share a request."""
    shared, alone = ([int(word) for word in line.split()] for line in compiled["ATTENTION"].splitlines())
    assert min(shared[0], alone[0]) >= 16
    assert (shared[1] > 0, alone[1]) == (True, 0)
    assert shared[2] == alone[2] == 0
    assert max(shared[3], alone[3]) < 227 * 2**10


def test_the_kernels_with_twelve_gates():
    """Every statistic of three packages, in one more power of two than eight."""
    tests = str(HERE / "kernels_interpreted.py")
    others = "ratio or doubt or peak or energy or surprise or spread or survival"
    selected = f"statistics_equal or gates_open and ({others}) or calibrated_gate"
    printed = pytest_interpreted("-v", tests, "-k", selected, packages=("toy", "more_gates"))
    for gate in ("ratio", "doubt", "peak", "energy", "surprise", "spread", "survival"):
        assert f"test_gates_open_where_the_plain_rule_does[{gate}] PASSED" in printed


COMPILE = """
import triton
from kernel_types import GATE, INPUTS, MATCHES, PROGRESS, WORTH
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from selfspec_cli.early_exit.gates import device_features
from selfspec_cli.vllm_plugin.v2.kernels import _end_step

TYPES = {
    "tokens": "*i64", "parts": "*fp32", "indices": "*i32", "blocks": "i32", "vocab_ids": "*i64", "inputs": INPUTS,
    "progress": PROGRESS, "gate": GATE, "lengths": "*i32", "logged": "*fp32", "worth": WORTH,
    "matches": MATCHES, "columns_of_text": "i32",
}
for free in (False, True):
    constants = {"K": 5, "GREEDY": True, "MAPPED": False, "BLOCKS": 64, "FREE": free, "MEASURES": free, "PLACES": 8}
    signature = {name: TYPES.get(name, "constexpr") for name in _end_step.arg_names}
    source = ASTSource(fn=_end_step, signature=signature, constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    if not free:
        print(len(device_features()), ptx.count("bar.sync"))
"""


BEGIN = """
import triton
from kernel_types import INPUTS, LIMITS, MATCHES, PROGRESS, VERDICT, WORTH
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from selfspec_cli.vllm_plugin.v2.round_setup import _begin_round

TYPES = {"inputs": INPUTS, "progress": PROGRESS, "lengths": "*i32", "budget": LIMITS, "worth": WORTH,
         "verdict": VERDICT, "matches": MATCHES, "step_value": "fp32"}
for measures in (False, True):
    constants = {"K": 5, "ROWS": 512, "LIMITS": measures, "FREE": measures, "MEASURES": measures}
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in _begin_round.arg_names}
    source = ASTSource(fn=_begin_round, signature=signature, constexprs=constants)
    print("measured" if measures else "fixed", len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]))
"""


MATCHING = """
import triton
from kernel_types import INPUTS, MATCHES, PROGRESS, VERDICT, WORTH
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from selfspec_cli.vllm_plugin.v2.counting import _turn
from selfspec_cli.vllm_plugin.v2.matches import _certain, _judge, _look_up
from selfspec_cli.vllm_plugin.v2.worth import _judge_confidence

TYPES = {"worth": WORTH, "statistics": "*fp32", "counts": "*i64", "num_sampled": "*i32",
         "matches": MATCHES, "verdict": VERDICT, "inputs": INPUTS, "progress": PROGRESS, "slots": "*i32",
         "own": "*fp32", "lengths": "*i32", "cost": "fp32", "logits": "*bf16", "draft_tokens": "*i64"}
for kernel in (_look_up, _judge, _certain, _turn, _judge_confidence):
    constants = {"BLOCK": 1024, "K": 16, "PLACES": 32, "ROWS": 32, "FREE": True, "MEASURES": True}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    print(ptx.count(".local"), ptx.count("atom"))
"""


ATTENTION = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from selfspec_cli.vllm_plugin.attention.one_query import _attend

TYPES = dict.fromkeys(("query", "key", "value", "out", "keys", "values"), "*bf16")
TYPES |= dict.fromkeys(("table", "seq_lens", "arrived"), "*i32") | dict.fromkeys(("partial", "found"), "*fp32")
TYPES |= {"slots": "*i64", "scale": "fp32"}
for keys, warps, stages, splits in ((256, 8, 1, 32), (128, 4, 2, 1)):
    constants = {"DIM": 128, "SHARED": 4, "ROWS": 16, "PAGE": 16, "KEYS": keys, "SPLITS": splits, "EARLY": True}
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in _attend.arg_names}
    whole = {name for name in _attend.arg_names if name not in {"scale", "table_columns", *constants}}
    places = [place for place, name in enumerate(_attend.arg_names) if name in whole]
    source = ASTSource(fn=_attend, signature=signature, constexprs=constants,
                       attrs={(place,): [["tt.divisibility", 16]] for place in places})
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = kernel.asm["ptx"]
    print(ptx.count("mma.sync"), ptx.count("atom"), ptx.count(".local"), kernel.metadata.shared)
"""


SEVERAL = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from selfspec_cli.vllm_plugin.weights.lowbit_one_token import _rows

TYPES = dict.fromkeys(("bias", "out"), "*bf16") | dict.fromkeys(("rounded", "words"), "*i32")
TYPES |= {"factors": "*fp32", "scales": "*fp16", "rows": "i32"}
places = [place for place, name in enumerate(_rows.arg_names) if name in TYPES]
for bits in (4, 8):
    constants = {"TOTAL": 64, "BIASED": False, "BITS": bits, "ROWS": 2, "GROUPS": 32, "REST": 1, "ASM": True,
                 "EARLY": True}
    signature = {name: TYPES.get(name, "constexpr") for name in _rows.arg_names}
    source = ASTSource(fn=_rows, signature=signature, constexprs=constants,
                       attrs={(place,): [["tt.divisibility", 16]] for place in places})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1, "launch_pdl": True})
    ptx = kernel.asm["ptx"]
    hint = "evict_first.L2::cache_hint"
    print(bits, ptx.count(hint + ".v4.b32"), ptx.count(hint + ".b32"), kernel.metadata.shared, ptx.count(".local"))
"""


ROUND = """
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from selfspec_cli.vllm_plugin.weights.rounding import _activate, _add_and_norm

TYPES = dict.fromkeys(("x", "residual", "weight", "normed", "left", "activated"), "*bf16")
TYPES |= {"rounded": "*i32", "factors": "*fp32", "groups": "i32", "epsilon": "fp32"}
for kernel, groups, warps in ((_add_and_norm, 64, 8), (_activate, 8, 2)):
    constants = {"TOKENS": 8, "HALVES": True, "GROUPS": groups, "EARLY": True}
    signature = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
    pointers = [place for place, name in enumerate(kernel.arg_names) if TYPES.get(name, "")[:1] == "*"]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants,
                       attrs={(place,): [["tt.divisibility", 16]] for place in pointers})
    options = {"num_warps": warps, "launch_pdl": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    loads = [len(re.findall(r"ld\\.global", part)) for part in ptx.split("griddepcontrol.wait", 1)]
    print(kernel.fn.__name__, ptx.count(".local"), *loads)
"""


FEW = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from selfspec_cli.vllm_plugin.weights.lowbit_few_tokens import _some_rows

TYPES = dict.fromkeys(("bias", "out"), "*bf16") | dict.fromkeys(("rounded", "words"), "*i8")
TYPES |= dict.fromkeys(("factors", "partial"), "*fp32") | {"scales": "*fp16", "arrived": "*i32"}
TYPES |= dict.fromkeys(("tokens", "groups_of_row", "rows"), "i32")
places = [place for place, name in enumerate(_some_rows.arg_names) if TYPES.get(name, "i32") != "i32"]
for bits, loads in ((4, ".v2.b32"), (8, ".v4.b32")):
    constants = {"BITS": bits, "BIASED": True, "WHOLE": True, "ROWS": 16, "TOKENS": 8, "WARPS": 4, "ACROSS": 1,
                 "AT_ONCE": 3, "LOOPS": False, "PARTS": 1, "ASM": True, "EARLY": True}
    signature = {name: TYPES.get(name, "constexpr") for name in _some_rows.arg_names}
    source = ASTSource(fn=_some_rows, signature=signature, constexprs=constants,
                       attrs={(place,): [["tt.divisibility", 16]] for place in places})
    options = {"num_warps": 4, "num_stages": 1, "launch_pdl": True}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = kernel.asm["ptx"]
    print(bits, ptx.count("mma.sync"), ptx.count("evict_first.L2::cache_hint" + loads), ptx.count(".local"),
          kernel.metadata.shared, 4 * 16 * 8 * 4)
"""


AHEAD = """
import logging
import os
import tempfile
from types import SimpleNamespace

import torch
from torch import nn
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.cache import FileCacheManager

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.vllm_plugin.weights import compiled_ahead, copied, lowbit

launched, compiled, logged = [], [], []


class Device:
    "An H100 that launches nothing."

    load_binary = staticmethod(lambda *_: (0, 0, 0, 0, 1024))
    unload_module = staticmethod(lambda *_: None)
    get_device_properties = staticmethod(lambda _: {"max_shared_mem": 232448})


class Driver:
    utils = Device()
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda _: 0)
    launcher_cls = staticmethod(lambda *_: lambda *arguments, **_: launched.append(arguments))


class FullDisk(FileCacheManager):
    def put(self, *_, **more):
        raise OSError(28, "No space left on device")


driver.set_active(Driver())
knobs.runtime.jit_post_compile_hook = lambda **more: compiled.append(more["fn"].name.rpartition(".")[2])
copied.kernels_of = lambda *_: lowbit
handler = logging.Handler()
handler.emit = lambda record: logged.append(record.getMessage())
logging.getLogger("vllm.selfspec").addHandler(handler)


def copy(bits, rows, columns):
    return copied.CopiedWeight(DRAFT_WEIGHTS[f"int{bits}"], torch.randn(rows, columns).bfloat16())


def beside(one, processors, block=lambda: None):
    compiled.clear()
    os.sched_getaffinity = lambda _: range(processors)
    layer = nn.Module()
    layer.quant_method, layer.copy_of_weight = copied.CopiedLinear(), one
    with compiled_ahead.beside(layer, None, 32, 0, SimpleNamespace(type="cuda"), 1):
        block()


def found(one, *numbers):
    "How many kernels had been compiled; which products are now that they are launched; and all launches."
    before, compiled[:], launched[:] = len(compiled), [], []
    for tokens in numbers:
        one(torch.randn(tokens, one.scales.shape[1] * 64).bfloat16())
    return before, sorted(set(compiled) - {"_round"}), len(launched)


with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
    knobs.cache.dir = folder
    several = copy(4, 2048, 512)
    beside(several, processors=16)
    print(*found(several, 1, 2, 5, 12, 16, 17, 32), logged)

    def fail():
        raise MemoryError("the layers do not fit")

    ended = copy(8, 2048, 512)
    try:
        beside(ended, processors=1, block=fail)
    except MemoryError as error:
        print(error, *found(ended, 32), logged)

    knobs.cache.manager_class, no_room = FullDisk, copy(4, 512, 8192)
    beside(no_room, processors=4)
    knobs.cache.manager_class = FileCacheManager
    print(*found(no_room, 32), logged)
"""


def test_what_is_compiled_ahead_is_not_compiled_when_it_is_launched(compiled):
    """And each kernel once: 4 and 8 tokens have the same product here. It ends with the block that it is beside where
    that raises, and a full disk is a warning; either way a launch compiles what it does not find."""
    whole, ended, full_disk = compiled["AHEAD"].splitlines()
    assert whole == "4 [] 14 []"
    assert ended.startswith("the layers do not fit ")
    before, product, launches, warnings = ended.removeprefix("the layers do not fit ").split()
    assert int(before) < 4 and (product, launches, warnings) == ("['_some_rows']", "2", "[]")
    assert full_disk == (
        "0 ['_some_rows'] 2 ['draft kernels: 5 could not be compiled ahead, and will be where they are first launched "
        "(OSError: [Errno 28] No space left on device)']"
    )


SHORTEN = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from selfspec_cli.vllm_plugin.contexts.window import _shorten

TYPES = {"table": "*i32", "columns": "i32", "seq_lens": "*i32", "left_out": "*i32", "window": "i32"}
constants = {"BLOCK_SIZE": 16, "KEPT": 512}  # more blocks than threads
signature = {name: TYPES.get(name, "constexpr") for name in _shorten.arg_names}
source = ASTSource(fn=_shorten, signature=signature, constexprs=constants)
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
print(ptx.rindex("ld.global"), ptx.index("bar.sync"), ptx.rindex("bar.sync"), ptx.index("st.global"))
"""


CHOOSE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from selfspec_cli.vllm_plugin.contexts.blocks import _choose, _weigh

TYPES = {"weights": "*fp32", "table": "*i32", "columns": "i32", "seq_lens": "*i32", "left_out": "*i32", "heads": "i32",
         "last": "i32", "most": "i32", "queries": "*bf16", "ends": "*i32", "rejected": "*i32", "cache": "*bf16",
         "scale": "fp32", "cache_block": "i32", "cache_head": "i32", "cache_token": "i32"}
CONSTANTS = {_choose: {"PAGE": 16, "COLUMNS": 2048},
             _weigh: {"PAGE": 16, "KEYS": 16, "DIM": 128, "DIMS": 128, "SHARED": 6, "ROWS": 16, "BLOCKS": 8}}
for kernel, constants in CONSTANTS.items():
    signature = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    read = ptx.rindex("ld.global")
    print(ptx.count("mma.sync"), read, ptx.index("bar.sync", read), ptx.index("st.global"))
"""


def test_the_kernels_that_shorten_a_block_table_read_all_before_they_write(compiled):
    """A row moves within itself, and a thread may overwrite what another one has to read."""
    places = [int(word) for word in compiled["SHORTEN"].split()]
    assert places == sorted(places)
    choose, weigh = ([int(word) for word in line.split()] for line in compiled["CHOOSE"].splitlines())
    assert choose[0] == 0 and choose[1:] == sorted(choose)[1:]
    assert weigh[0] > 0  # its products are on tensor cores


def test_the_kernel_that_begins_a_round_compiles_for_cuda(compiled):
    """With what is learnt of confidence, and without."""
    words = compiled["BEGIN"].split()
    assert words[::2] == ["fixed", "measured"]
    assert int(words[3]) > int(words[1])


def test_the_kernels_of_free_drafts_compile_for_cuda(compiled):
    look_up, judge, certain, turn, confidence = (line.split() for line in compiled["MATCHING"].splitlines())
    assert look_up == ["0", "1"] and certain == turn == ["0", "0"]
    assert judge == ["0", "3"]  # two counters, and the rows that go on
    assert confidence == ["0", "4"]  # tokens that stood and that were judged, by confidence and by position


def test_the_kernel_with_the_gates_compiles_for_cuda_and_more_gates_add_no_reduction(compiled):
    """For compute capability 9.0, as far as PTX and machine code: Triton brings ptxas."""
    few = compiled["COMPILE"].split()
    many = run("-c", COMPILE, packages=("toy", "more_gates")).split()
    assert (few[0], many[0]) == ("6", "12")
    assert few[1] == many[1]
