"""Tokens times integer copies, and what rounds them, in Triton's interpreter. Run as kernels_interpreted.py is."""

import json
from pathlib import Path

import pytest
import torch
import triton
from torch import nn
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.draft_weights.integers import GROUP
from selfspec_cli.vllm_plugin.attention import one_query
from selfspec_cli.vllm_plugin.weights import few_tokens, lowbit, one_token, rounding
from selfspec_cli.vllm_plugin.weights.rounding import none_arrived

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_device(DEVICE)
GPU = DEVICE == "cuda"
MEASURED = Path(__file__).parents[2] / "results/published/gpu/tune_kernels_h200.json"
WITHIN = 1.03  # of the best

ASKED = [  # each with a shape of its own
    ((64, 256), {"rows_at_once": 16, "parts": 1, "stages": 1}),
    ((40, 320), {"rows_at_once": 16, "parts": 1, "stages": 2}),  # a tile and a step that stick out
    ((72, 704), {"rows_at_once": 32, "parts": 3, "stages": 2}),  # parts that differ
    ((130, 448), {"rows_at_once": 64, "parts": 2, "stages": 3}),  # warps with other rows
    ((130, 128), {"rows_at_once": 128, "parts": 1, "stages": 1}),  # no warps that share rows
    ((48, 64), {}),
]


COUNTS = [2, 7, 9, 16, 19, 32]
"""Numbers of tokens: in each room (8, 16, 32), some that fill it and some that do not. Each is tried with two
shapes, once for either width."""


def product_and_wanted(bits, shape, tokens, dtype, asked, whole):
    """Of random tokens and weights, and a bias where their number is odd; whole: of integers that 8 bits hold."""
    rows, columns = shape
    draw = torch.Generator(DEVICE).manual_seed(rows + tokens)
    kind = DRAFT_WEIGHTS[f"int{bits}"]
    copy = kind.quantise(torch.randn(rows, columns, generator=draw) / columns**0.5)
    x = torch.randn(tokens, columns, generator=draw)
    if whole:
        x = x.mul(60).round().clamp(-127, 127)
        x[:, ::GROUP] = -127
    x[tokens // 2, -GROUP:] = 0  # a group without a largest value
    bias = torch.randn(rows, generator=draw).to(dtype) if tokens % 2 else None
    x = x.to(dtype)
    rounded = rounding.round_tokens(x, bits)
    got = few_tokens.product(*rounded, tokens, copy["words"], copy["scales"], bias, dtype, asm=GPU, **asked)
    assert (got.dtype, got.shape) == (dtype, (tokens, rows))
    assert not none_arrived(x.device).any()  # as it was found
    return got.double(), x.double() @ kind.dequantise(copy, torch.float64).T + (0 if bias is None else bias.double())


@pytest.mark.parametrize(
    ("bits", "tokens", "shape", "asked"),
    [
        (bits, COUNTS[(place + shift) % 6], *case)
        for place, case in enumerate(ASKED)
        for bits, shift in ((4, 0), (8, 1))
    ],
)
def test_few_tokens_are_multiplied_as_by_the_copy_itself(bits, shape, tokens, asked):
    got, wanted = product_and_wanted(bits, shape, tokens, torch.bfloat16, asked, whole=False)
    assert (got - wanted).norm() / wanted.norm() < 0.015  # tokens are rounded to 8 bits, products to bf16
    assert (got - wanted).abs().max() < 0.1 * wanted.square().mean().sqrt()  # no single one is wrong


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("tokens", "shape", "asked"), [((2, 6, 23)[place % 3], *case) for place, case in enumerate(ASKED)]
)
def test_tokens_that_8_bits_hold_are_multiplied_exactly(bits, shape, tokens, asked):
    # In float32, which the kernels do not keep from reading tokens in, nothing is rounded.
    got, wanted = product_and_wanted(bits, shape, tokens, torch.float32, asked, whole=True)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [2, 8, 9, 16, 17, 32])
@pytest.mark.parametrize(("rows", "groups"), [(2304, 36), (12288, 36), (2304, 96), (128256, 64), (100, 1)])
@pytest.mark.parametrize("bits", [4, 8])
def test_usual_settings_are_possible(bits, rows, groups, tokens):
    usual = few_tokens.usual_settings(rows, groups, bits, tokens)
    assert usual.rows_at_once.bit_count() == 1 and usual.rows_at_once >= 16
    assert 1 <= usual.parts <= groups and usual.stages >= 1


@pytest.mark.parametrize(
    ("tokens", "words_a_row", "said"),
    [
        (0, 16, "0 tokens, not 1 to 32"),
        (33, 16, "33 tokens, not 1 to 32"),
        (1, 16, "1 token: that is a product of one_token"),  # which is rounded in another order
        (2, 12, "no copy of 4 or 8 bits"),
    ],
)
def test_other_numbers_of_tokens_and_other_copies_are_refused(tokens, words_a_row, said):
    words, scales = torch.zeros(16, words_a_row, dtype=torch.int32), torch.ones(16, 1, dtype=torch.float16)
    with pytest.raises(ValueError, match=said):
        few_tokens.product(words, scales, tokens, words, scales, None, torch.bfloat16)


# ---- one token ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize(("columns", "at_once"), [(192, 4), (256, 4), (448, 2)])  # steps: a part, whole, both
@pytest.mark.parametrize("rows_at_once", [1, 2, 4])  # of five
def test_one_token_times_several_rows(name, columns, at_once, rows_at_once):
    kind = DRAFT_WEIGHTS[name]
    copy = kind.quantise(torch.randn(5, columns))
    x, bias = torch.randn(1, columns), torch.randn(5)
    parts = copy["words"], copy["scales"]
    asked = {"rows_at_once": rows_at_once, "at_once": at_once, "asm": GPU}
    bits = one_token.width_of(copy["words"], columns)
    got = one_token.product(*rounding.round_tokens(x, bits), *parts, bias, x.dtype, **asked)
    want = x.double() @ kind.dequantise(copy, torch.float64).T + bias
    # The kernel rounds tokens to 8 bits, which is all that it adds.
    assert (got - want).norm() / (want - bias).norm() < 0.015
    whole = x.round().clamp(-1, 1) * 127  # 8 bits hold these tokens exactly
    exact = one_token.product(*rounding.round_tokens(whole, bits), *parts, None, x.dtype, **asked)
    want = whole.double() @ kind.dequantise(copy, torch.float64).T
    assert (exact - want).norm() / want.norm() < 1e-5


# ---- the operator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize(("tokens", "plain"), [(1, True), (3, True), (32, True), (33, True), (33, False), (65, True)])
def test_the_operator_takes_the_kernel_that_fits(name, tokens, plain, monkeypatch):
    """plain: whether the target has a weight that is not quantised, for many tokens."""
    called = []
    for module in (one_token, few_tokens):
        product = module.product
        monkeypatch.setattr(
            module, "product", lambda *given, of=module, run=product: called.append(of) or run(*given, asm=GPU)
        )
    kind = DRAFT_WEIGHTS[name]
    weight = torch.randn(20, 128).to(torch.bfloat16)
    copy = lowbit.prepare(kind.quantise(weight))
    x, bias = torch.randn(tokens, 128).to(torch.bfloat16), torch.randn(20).to(torch.bfloat16)
    got = lowbit.linear(x, copy, bias, weight if plain else None)
    turns = {1: [one_token], 33: [few_tokens, one_token], 65: []}
    assert called == turns.get(tokens, [few_tokens])
    dense = weight if tokens == 65 else kind.dequantise(kind.quantise(weight), torch.float64)
    wanted = x.double() @ dense.double().T + bias.double()
    assert (got.double() - wanted).norm() / wanted.norm() < 0.015


def usual(row, measured):
    """What a kernel takes today for a case of the published file, as the file says settings."""
    if row["kind"] == "attention":
        settings = one_query.usual_settings(row["tokens"], measured["heads"][1], row["context"], torch.device(DEVICE))
        return dict(zip(("at_once", "warps", "stages", "splits"), settings, strict=True))
    rows, columns = measured["products"][row["kind"]]
    case = rows, columns // GROUP, measured["bits"]
    if row["tokens"] == 1:
        return dict(zip(("rows_at_once", "at_once"), one_token.usual_settings(*case), strict=True))
    return few_tokens.possible(few_tokens.usual_settings(*case, row["tokens"]), *case, row["tokens"])._asdict()


def test_usual_settings_are_the_best_that_an_h200_measured():
    """Or within 3 % of it, at every size of both shapes but one, whose setting of today was not measured."""
    others = []
    for measured in json.loads(MEASURED.read_text())["shapes"].values():
        for row in measured["chosen"]:
            good = [row["setting"], *([row["usual"]] if row["usual_over_best"] <= WITHIN else [])]
            columns = measured["products"].get(row["kind"], (0, 1))[1]
            step = triton.next_power_of_2(columns // GROUP)  # a longer one takes the whole row at once, too
            today = usual(row, measured)
            if not any(same(today, one, step) for one in good):
                others.append((row["kind"], row["tokens"], row.get("context")))
    assert others == [("attention", 16, 1024)]


def same(one, other, step):
    if "rows_at_once" in one and "at_once" in one:
        one, other = ({**each, "at_once": min(each["at_once"], step)} for each in (one, other))
    return one == other


# ---- norms and activations that round, and the pass that puts them into a graph --------------------------------------

CASES = [
    (1, 4, 64, torch.float32),
    (1, 8, 704, torch.bfloat16),
    (2, 4, 704, torch.float32),
    (2, 8, 64, torch.bfloat16),
    (9, 4, 64, torch.bfloat16),
    (9, 8, 704, torch.float32),
    (32, 4, 704, torch.bfloat16),
    (32, 8, 64, torch.float32),
]
"""Tokens (each with another room), bits (halves or not), columns (one group, or more than a program takes), and type:
each with each value of any other."""


def as_given(rounded, factors, tokens, groups):
    """The part of what was rounded that a product reads."""
    room = rounding.padded(tokens)
    words = rounded[: room * groups * rounding.WORDS].view(groups, room, -1)[:, :tokens]
    return words, factors[: room * groups].view(groups, room)[:, :tokens]


def assert_rounded(found, values, bits):
    """`found` is what the kernel that does nothing else makes of `values`."""
    tokens, groups = values.shape[0], values.shape[1] // 64
    wanted = as_given(*rounding.round_tokens(values, bits), tokens, groups)
    for one, other in zip(as_given(*found, tokens, groups), wanted, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [1, 2, 9, 32])
def test_bytes_times_their_factors_are_the_tokens(tokens, bits):
    x = torch.randn(tokens, 192)
    x[0, 64:128] = 0
    words, factors = as_given(*rounding.round_tokens(x, bits), tokens, 3)
    signed = words.contiguous().view(torch.int8).float()
    halves = bits == 4 and tokens > 1  # as few_tokens.py explains
    if halves:
        signed = signed.view(3, tokens, 4, 2, 2, 4).transpose(3, 2).reshape(3, tokens, 64)
        factors = factors * 16
    back = (signed * factors[..., None]).view(3, tokens, 2, 8, 4).transpose(4, 3).reshape(3, tokens, 64)
    back = back.transpose(0, 1).reshape(tokens, 192)
    assert (back - x).abs().max() <= x.abs().max() / 127
    assert (back - x).norm() / x.norm() < 0.01


@pytest.mark.parametrize(("tokens", "bits", "columns", "dtype"), CASES)
def test_a_norm_is_the_one_of_vllm_and_is_rounded(tokens, bits, columns, dtype):
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in [(tokens, columns)] * 2 + [(columns,)])
    normed, left, *rounded = rounding.add_and_norm(x, residual, weight, 1e-5, bits)
    total = x.float() + residual.float()
    near = {"rtol": 1e-5 if dtype is torch.float32 else 2e-2, "atol": 1e-5}  # the interpreter cuts bits off
    torch.testing.assert_close(left, total.to(dtype), **near)
    wanted = (total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5)).to(dtype) * weight
    torch.testing.assert_close(normed, wanted, **near)
    if dtype is torch.bfloat16 or not GPU:  # float32 is rounded from another last bit where it is compiled
        assert_rounded(rounded, normed, bits)


@pytest.mark.parametrize(("tokens", "bits", "columns", "dtype"), CASES)
def test_an_activation_is_the_one_of_vllm_and_is_rounded(tokens, bits, columns, dtype):
    x = torch.randn(tokens, 2 * columns).to(dtype)
    values, *rounded = rounding.activate(x, bits)
    wanted = F.silu(x[:, :columns].float()) * x[:, columns:].float()
    torch.testing.assert_close(values, wanted.to(dtype), rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-5)
    if dtype is torch.bfloat16 or not GPU:
        assert_rounded(rounded, values, bits)


@pytest.mark.parametrize(("tokens", "bits"), [(33, 8), (0, 4)])
def test_what_no_product_reads_rounded_is_computed_all_the_same(tokens, bits):
    x, residual, weight = torch.randn(tokens, 128), torch.randn(tokens, 128), torch.randn(128)
    normed, left, *_ = rounding.add_and_norm(x, residual, weight, 1e-5, bits)
    assert left.equal(x + residual)
    torch.testing.assert_close(normed, F.rms_norm(left, (128,), weight, 1e-5))
    values, *_ = rounding.activate(x, bits)
    torch.testing.assert_close(values, F.silu(x[:, :64]) * x[:, 64:])


# ---- the pass -------------------------------------------------------------------------------------------------------

HIDDEN, WIDE = 128, 64
SHAPES = {"o": (HIDDEN, HIDDEN), "gate_up": (2 * WIDE, HIDDEN), "down": (HIDDEN, WIDE), "qkv": (16, HIDDEN)}


class Layer(nn.Module):
    """What vLLM compiles between one attention and the next."""

    def __init__(self, kind, norm=None):
        super().__init__()
        self.weights = nn.ParameterDict({name: torch.randn(shape) / shape[1] ** 0.5 for name, shape in SHAPES.items()})
        self.copies = nn.ModuleDict({name: self.copy(kind, weight.data) for name, weight in self.weights.items()})
        self.norms = nn.ParameterList([torch.randn(HIDDEN), torch.randn(HIDDEN)])
        self.activation, self.norm = lowbit.Activation(), norm

    def copy(self, kind, weight):
        copy = lowbit.prepare(kind.quantise(weight))
        return nn.ParameterDict({key: nn.Parameter(tensor, False) for key, tensor in copy.items()})

    def times(self, name, x):
        return lowbit.linear(x.reshape(-1, x.shape[-1]), dict(self.copies[name].items()), None, self.weights[name])

    def forward(self, x, residual):
        from vllm import ir

        x, residual = ir.ops.fused_add_rms_norm.maybe_inplace(self.times("o", x), residual, self.norms[0], 1e-5)
        x = self.times("down", self.activation(self.times("gate_up", x)))
        weight = self.norms[1] if self.norm is None else self.norm(self.norms[1])
        x, residual = ir.ops.fused_add_rms_norm(x, residual, weight, 1e-5)
        return self.times("qkv", x), x, residual


def operator_of(node):
    """Its name; "linear_rounded" for a product that is given rounded tokens."""
    rounded = "linear_integers" in str(node.target) and node.args[1] is not None and node.args[2] is not None
    return str(node.target).replace("integers", "rounded") if rounded else str(node.target)


def compiled(layer, change):
    """`layer` through Inductor, its graphs first through `change` and then to what vLLM makes of its own operators; and
    the operators of the last graph, as `change` left it."""
    from vllm.compilation.passes.inductor_pass import CallableInductorPass
    from vllm.compilation.passes.ir.inplace_functionalization import VllmIRInplaceFunctionalizationPass
    from vllm.compilation.passes.ir.lowering_pass import VllmIRLoweringPass
    from vllm.config import VllmConfig

    config, seen = VllmConfig(), []
    lower = VllmIRLoweringPass(config)

    def change_and_lower(graph):
        change(graph)
        seen[:] = [operator_of(node) for node in graph.nodes if "." in str(node.target)]
        lower(graph)

    options = {
        "post_grad_custom_post_pass": CallableInductorPass(change_and_lower, uuid=object().__repr__()),
        "pre_grad_custom_pass": VllmIRInplaceFunctionalizationPass(config),
    }
    torch._dynamo.reset()
    return torch.compile(layer, dynamic=True, fullgraph=True, options=options), seen


@pytest.fixture
def as_traced_by_vllm(monkeypatch):
    pytest.importorskip("vllm")
    import vllm.ir.ops  # noqa: F401 - registers the operators
    from vllm import ir
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.config.utils import Range

    for module in (one_token, few_tokens):
        product = module.product
        monkeypatch.setattr(module, "product", lambda *given, run=product: run(*given, asm=GPU))
    caches = (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    )
    with caches[0], caches[1], torch.inference_mode(), pass_context(Range(1, 64)), ir.enable_torch_wrap(True):
        yield


FUSED = ["linear_integers", "add_rms_norm_rounded", "linear_rounded", "silu_and_mul_rounded", "linear_rounded"]


@pytest.mark.parametrize(("bits", "numbers"), [(8, (5, 33)), (4, (5, 1, 32, 33, 65))])
def test_a_compiled_layer_rounds_in_front_of_its_products_and_finds_the_same(bits, numbers, as_traced_by_vllm):
    """Traced with few tokens: the operators choose kernels when they run, not the graph."""
    layer = Layer(DRAFT_WEIGHTS[f"int{bits}"])
    together, seen = compiled(layer, lowbit.round_in_front)
    for tokens in numbers:
        given = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN)
        wanted = layer(*(tensor.clone() for tensor in given))
        torch.testing.assert_close(together(*given), wanted, rtol=1e-4, atol=1e-4)
    assert seen == [f"selfspec.{name}.default" for name in [*FUSED, "add_rms_norm_rounded", "linear_rounded"]]


def test_a_norm_whose_weight_is_computed_stays_as_it_is(as_traced_by_vllm):
    """The kernel would read the weight before it is written (Gemma adds 1 to it)."""
    layer = Layer(DRAFT_WEIGHTS["int8"], norm=lambda weight: weight + 1)
    together, seen = compiled(layer, lowbit.round_in_front)
    together(torch.randn(3, HIDDEN), torch.randn(3, HIDDEN))
    ours = [name.split(".")[1] for name in seen if "aten" not in name]
    assert ours == [*FUSED, "fused_add_rms_norm", "linear_integers"]


class TwoWidths(Layer):
    """Two products of one norm, with copies of 8 and of 4 bits."""

    def __init__(self):
        super().__init__(DRAFT_WEIGHTS["int8"])
        self.copies["narrow"] = self.copy(DRAFT_WEIGHTS["int4"], self.weights["qkv"].data)
        self.weights["narrow"] = self.weights["qkv"].data

    def forward(self, x, residual):
        from vllm import ir

        x, residual = ir.ops.fused_add_rms_norm.maybe_inplace(x, residual, self.norms[0], 1e-5)
        return self.times("qkv", x), self.times("narrow", x), residual


def test_copies_of_two_widths_behind_one_norm(as_traced_by_vllm):
    layer, given = TwoWidths(), [torch.randn(3, HIDDEN) for _ in range(2)]
    wanted = compiled(layer, lambda graph: None)[0](*(tensor.clone() for tensor in given))
    together, seen = compiled(layer, lowbit.round_in_front)
    torch.testing.assert_close(together(*given), wanted, rtol=1e-4, atol=1e-4)
    assert sorted(name.split(".")[1] for name in seen) == ["add_rms_norm_rounded", "linear_integers", "linear_rounded"]


def test_a_norm_of_another_form_stays_as_it_is(as_traced_by_vllm, monkeypatch):
    monkeypatch.setattr(lowbit, "WIDEST", HIDDEN - 1)
    together, seen = compiled(Layer(DRAFT_WEIGHTS["int8"]), lowbit.round_in_front)
    together(torch.randn(3, HIDDEN), torch.randn(3, HIDDEN))
    assert [name.split(".")[1] for name in seen].count("fused_add_rms_norm") == 2
