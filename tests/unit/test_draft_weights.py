"""Copies of weights for drafts: how a weight is quantised, and that the target is left as it is. Kernels need a GPU."""

import sys
from types import SimpleNamespace

import pytest
import torch
from exit_heads import lens_head, translator_head
from refusals import said
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS, DraftWeights, WeightFacts, require_draft_weights
from selfspec_cli.early_exit.draft_weights.integers import GROUP, Integers
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.vllm_plugin import exit_head, step_bytes
from selfspec_cli.vllm_plugin.weights import copied as copied_weights
from selfspec_cli.vllm_plugin.weights import fp8 as fp8_kernels
from selfspec_cli.vllm_plugin.weights.copied import Watch, copied, keep_weights_asleep, plain_weight, refill
from selfspec_cli.vllm_plugin.weights.shared import replace_in_layers, with_replaced

FP8 = DRAFT_WEIGHTS["fp8"]
INTEGERS = [DRAFT_WEIGHTS["int4"], DRAFT_WEIGHTS["int8"]]
COPYING = [name for name, kind in DRAFT_WEIGHTS.items() if kind.copies]


def weight(rows, columns, scale=0.02):
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * scale).to(torch.bfloat16)


def quantise(values):
    return tuple(FP8.quantise(values).values())


def restored(values):
    return FP8.dequantise(FP8.quantise(values), torch.float32)


# ---- every kind -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COPYING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_stands_for_its_weight(name, dtype):
    kind, values = DRAFT_WEIGHTS[name], weight(48, 128).to(dtype)
    copy = kind.quantise(values)
    back, x = kind.dequantise(copy, dtype), weight(3, 128, 1.0).to(dtype)
    assert (back.shape, back.dtype) == (values.shape, dtype)
    assert not back.equal(values)
    error = (back.float() - values.float()).norm() / values.float().norm()
    assert error < 2.0 ** (1 - kind.bits / 2), error  # half the bits of the copy are more than kept
    assert kind.product(x, copy).equal(F.linear(x, back))
    assert kind.product(x, copy).dtype is dtype
    for bad in (float("nan"), float("inf")):
        values[2, 3] = bad
        with pytest.raises(SettingsError, match=f"{name!r} needs finite weights.*allowed: shared"):
            kind.quantise(values)


NO_COPIES = [
    ("fp8", WeightFacts("cuda", quantization="awq", is_moe=True), "experts are quantised already (awq)"),
    ("fp8", WeightFacts("cuda", is_moe=True, expert_parallel=True), "here: enable_expert_parallel = True, and copies"),
    ("fp8", WeightFacts("cuda", capability=(8, 0), device_name="A100"), "capability 8.9 or more, and this is A100"),
    ("int4", WeightFacts("cuda", dtype="float16"), "bfloat16, not float16"),
    ("int4", WeightFacts(row_lengths=(128, 96)), "rows of 96 values (on each tensor-parallel rank)"),
    ("int8", WeightFacts(row_lengths=(128, 96)), "rows of 96 values (on each tensor-parallel rank)"),
]
COPIES = [
    *(("fp8", WeightFacts("cpu", dtype, "", False)) for dtype in (None, "float32", "float16", "bfloat16")),
    ("fp8", WeightFacts("cuda", "bfloat16", capability=(8, 9))),
    ("fp8", WeightFacts("cuda", "bfloat16", quantization="awq", capability=(8, 9))),
    ("fp8", WeightFacts("cuda", "bfloat16", is_moe=True, capability=(8, 9))),
    ("fp8", WeightFacts(row_lengths=(96,))),
    ("int4", WeightFacts("cpu", dtype="float32")),
    ("int4", WeightFacts("cuda", dtype="bfloat16")),
    ("int8", WeightFacts(row_lengths=(128, 64))),
]


@pytest.mark.parametrize(("name", "facts", "reason"), NO_COPIES)
def test_where_there_can_be_no_copies(name, facts, reason):
    found = said(SettingsError, require_draft_weights, name, facts)
    assert reason in found and "shared" in found.partition("allowed:")[2]
    require_draft_weights("shared", facts)


@pytest.mark.parametrize(("name", "facts"), COPIES)
def test_where_there_can_be_copies(name, facts):
    require_draft_weights(name, facts)


def test_kernels_that_have_no_experts_are_refused_for_a_mixture_of_them():
    class Linear(DraftWeights):
        name, kernels = "linear", "a.module"

    facts = WeightFacts("cuda", is_moe=True)
    assert "its kernels multiply linear layers" in Linear().reason_against(facts)
    assert Linear().reason_against(WeightFacts("cpu", is_moe=True)) is None
    with_kernels = [kind for kind in DRAFT_WEIGHTS.values() if kind.kernels is not None]
    assert len(with_kernels) > 1 and all(kind.reason_against(facts) is None for kind in with_kernels)


# ---- 8-bit floats -------------------------------------------------------------------------------------------------


def test_one_scale_a_row_that_bf16_holds_and_the_largest_value_at_448():
    values = weight(8, 64) * torch.tensor([10.0**power for power in range(-4, 4)], dtype=torch.bfloat16)[:, None]
    copy, scale = quantise(values)
    assert (copy.dtype, copy.shape, scale.dtype, scale.shape) == (torch.float8_e4m3fn, (8, 64), torch.float32, (8, 1))
    assert (copy.float().abs().amax(1) == 448).all()


# ---- integers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: kind.name)
def test_a_copy_takes_the_bits_that_it_says(kind):
    values = torch.randn(32, 4 * GROUP)
    stored = sum(tensor.numel() * tensor.element_size() * 8 for tensor in kind.quantise(values).values())
    assert stored == kind.bits * values.numel()
    assert kind.kernels == "selfspec_cli.vllm_plugin.weights.lowbit" and DRAFT_WEIGHTS["fp8"].bits == 8


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: kind.name)
def test_of_five_scales_each_group_gets_the_best(kind: Integers):
    groups = torch.randn(64, 4, GROUP, generator=torch.Generator().manual_seed(2))
    top, largest = 2 ** (kind.width - 1), groups.abs().amax(2, keepdim=True)
    extreme = torch.where(groups.amax(2, keepdim=True) == largest, largest, -largest)
    tried = [extreme / -top, *(largest / (top - 1) * closer for closer in (1.0, 0.95, 0.9, 0.85))]
    halves = [scale.half().float() for scale in tried]
    errors = [((groups / one).round().clamp(-top, top - 1) * one - groups).square().sum(2) for one in halves]
    restored = kind.dequantise(kind.quantise(groups.flatten(1)), torch.float32).view_as(groups)
    assert torch.allclose((restored - groups).square().sum(2), torch.stack(errors).amin(0), rtol=1e-4)


def test_a_fit_minds_what_the_data_do():
    """Inputs that do not depend on each other, some a hundred times as large: only the choice of scales can differ."""
    values = torch.randn(32, 2 * GROUP, generator=torch.Generator().manual_seed(4))
    sizes = torch.ones(2 * GROUP)
    sizes[::8] = 1e4
    kind = DRAFT_WEIGHTS["int4"]
    fitted, rounded = (
        float(((kind.dequantise(copy, torch.float32) - values).square() * sizes).sum())
        for copy in (kind.fit(values, torch.diag(sizes)), kind.quantise(values))
    )
    assert fitted < 0.99 * rounded


@pytest.mark.parametrize("broken", [torch.randn(4, 96), torch.full((4, GROUP), torch.nan)])
def test_a_fit_refuses_what_rounding_does(broken):
    kind, moment = DRAFT_WEIGHTS["int4"], torch.eye(broken.shape[1])
    assert said(SettingsError, kind.fit, broken, moment) == said(SettingsError, kind.quantise, broken)


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: kind.name)
def test_copies_of_experts_are_bytes_that_vllms_kernels_read(kind):
    """As `fused_moe_kernel_gptq_awq` reads them: from a byte, or half of one, minus the middle, times the scale."""
    pytest.importorskip("triton")
    from selfspec_cli.vllm_plugin.weights import lowbit

    experts = torch.randn(3, 32, 2 * GROUP)
    copy = kind.quantise(experts.flatten(0, 1))
    copies = {name: tensor.view(3, 32, -1) for name, tensor in copy.items()}
    bits = kind.width
    stored = lowbit.as_bytes(copies)
    assert stored.dtype is torch.uint8
    columns = torch.arange(2 * GROUP)
    halves = (stored[:, :, columns // 2].int() >> (columns % 2 * 4)) & 15 if bits == 4 else None
    values = stored.int() if halves is None else halves
    scales = copies["scales"].float()[:, :, columns // GROUP]
    read = (values - 2 ** (bits - 1)) * scales
    assert read.flatten(0, 1).equal(kind.dequantise(copy, torch.float32))


# ---- products -----------------------------------------------------------------------------------------------------


@pytest.fixture
def vllm(monkeypatch):
    """Stands in for vLLM's kernels, which need CUDA."""

    def scaled_fp8_quant(x, use_per_token_if_dynamic):
        assert use_per_token_if_dynamic
        return quantise(x)

    def cutlass_scaled_mm(a, b, scale_a, scale_b, out_dtype):
        return ((a.float() * scale_a) @ (b.float() * scale_b.t())).to(out_dtype)

    operators = SimpleNamespace(scaled_fp8_quant=scaled_fp8_quant, cutlass_scaled_mm=cutlass_scaled_mm)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(_custom_ops=operators))


def traced(tokens):
    """The product of so many tokens as Inductor is given it."""

    def product(x, copy, scale):
        return fp8_kernels.linear(x, {"weight": copy, "scale": scale}, None, copy)

    graph = make_fx(product, tracing_mode="fake")(weight(tokens, 64), *quantise(weight(32, 64)))
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_one_token_is_one_operator_to_a_compiler_and_more_are_operations_that_it_can_fuse(vllm):
    assert traced(1) == [torch.ops.selfspec.gemv_e4m3.default]
    assert torch.ops.aten.amax.default in traced(5)
    assert torch.ops.selfspec.gemv_e4m3.default not in traced(5)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_a_product_of_tokens(vllm, compiled):
    values, x = weight(32, 64), weight(5, 64, 1.0)
    product = torch.compile(fp8_kernels.linear, backend="aot_eager") if compiled else fp8_kernels.linear
    bias = weight(1, 32, 1.0)[0]
    out = product(x, fp8_kernels.prepare(FP8.quantise(values)), bias, values)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), restored(x) @ restored(values).T + bias, atol=0.02, rtol=0.02)


# ---- modules that share everything but their linear weights --------------------------------------------------------


class Linear(nn.Module):
    """Stands in for vLLM's LinearBase: a quant_method does the work."""

    def __init__(self, out, size):
        super().__init__()
        self.weight = nn.Parameter(weight(out, size), requires_grad=False)
        self.bias = nn.Parameter(weight(1, out)[0], requires_grad=False)
        self.quant_method = SimpleNamespace(apply=lambda layer, x, bias: F.linear(x, layer.weight, bias))

    def forward(self, x):
        return self.quant_method.apply(self, x, self.bias)


class Attention(nn.Module):
    """What a forward pass looks up by name: never copied, though a linear layer is in it."""

    def __init__(self):
        super().__init__()
        self.inside = Linear(64, 64)

    def forward(self, x):
        return x


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64, dtype=torch.bfloat16)
        self.attn = Attention()
        self.mlp = nn.Sequential(Linear(128, 64), nn.SiLU(), Linear(64, 128))
        self.call = self.run  # a module that stores a method of its own, as vLLM's custom operators do

    def run(self, x):
        return x + self.mlp(self.attn(self.norm(x)))

    def forward(self, x):
        return self.call(x)


def make_copy(module, name):
    return copied(FP8, torch.bfloat16, module, name) if isinstance(module, Linear) else None


def on_copies(layer):
    return with_replaced(layer, lambda part, name: part if part is layer.attn else make_copy(part, name), "layers.0")


def test_what_is_changed_computes_with_the_copies_and_the_layer_with_its_own_weights():
    layer = Layer()
    x = weight(3, 64, 1.0)
    before = layer(x)
    changed = on_copies(layer)
    wanted = Layer()
    for place in (0, 2):
        wanted.mlp[place].weight = nn.Parameter(restored(layer.mlp[place].weight).to(torch.bfloat16))
        wanted.mlp[place].bias = layer.mlp[place].bias
    torch.testing.assert_close(changed(x), wanted(x), atol=0.02, rtol=0.02)
    assert not changed(x).equal(before)
    assert layer(x).equal(before)
    assert changed.call.__self__ is changed  # not the target's method, which would run the target's weights


class FusedExperts(nn.Module):
    """Named so that it is taken for what it is."""


def test_the_first_layers_are_replaced_and_experts_are_shared_whole():
    layers = nn.ModuleList(Layer() for _ in range(3))
    layers[1].moe = nn.Sequential(Linear(64, 64), FusedExperts())
    context = {f"layers.{i}.attn": layer.attn for i, layer in enumerate(layers)}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    names = []

    def make(module, name):
        names.append(name)
        return make_copy(module, name)

    changed = replace_in_layers(layers, (0, 1), config, make)
    assert len(changed) == 2
    assert {"layers.0.mlp.0", "layers.1.mlp.2"} < set(names)
    for layer, made in zip(layers, changed, strict=False):
        assert made is not layer and made.mlp[0] is not layer.mlp[0] and made.attn is layer.attn
    assert changed[1].moe is layers[1].moe
    assert layers[0].mlp[0].quant_method is not changed[0].mlp[0].quant_method


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_linear_layer_that_is_not_plain_bf16_is_refused_by_name(dtype):
    layer = Layer()
    layer.mlp[2].weight = nn.Parameter(torch.zeros(64, 128, dtype=dtype), requires_grad=False)
    with pytest.raises(SettingsError, match=r"layers\.0\.mlp\.2 .*allowed: shared"):
        on_copies(layer)


def test_copies_count_with_their_own_bytes_beside_the_target(monkeypatch):
    monkeypatch.setattr(copied_weights, "kernels_of", lambda kind, device: fp8_kernels)  # as on CUDA
    layer = Layer()
    changed = on_copies(layer)
    linear = 2 * 64 * 128
    beside = step_bytes.weight_bytes([layer, changed]) - step_bytes.weight_bytes([layer])
    assert beside == linear + 4 * (128 + 64)  # a byte a weight, a float32 a row
    assert step_bytes.weight_bytes([layer]) - step_bytes.weight_bytes([changed]) == linear - 4 * (128 + 64)


class Packed(Linear):
    """A linear layer as vLLM's CPU build leaves it: the weight is in a buffer of the kernel's, the parameter empty."""

    def __init__(self, values):
        super().__init__(*values.shape)
        self.input_size_per_partition, self.cpu_linear = values.shape[1], lambda x: F.linear(x, values)
        self.weight = nn.Parameter(torch.empty(0, dtype=values.dtype), requires_grad=False)
        self.quant_method = SimpleNamespace(apply=lambda layer, x, bias: layer.cpu_linear(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_vllm_packed_is_read_back_exactly(dtype, monkeypatch):
    monkeypatch.setattr(copied_weights, "UNIT_VECTORS", 50)
    values = weight(32, 128).to(dtype)
    assert plain_weight(Packed(values)).equal(values)
    assert plain_weight(nn.Conv2d(1, 1, 3)) is None
    assert plain_weight(nn.Module()) is None


@pytest.mark.parametrize("sizes", ["size_per_partition", "size"], ids=["split over ranks", "a router of experts"])
def test_a_packed_weight_counts_with_the_bytes_that_it_had(sizes):
    """An engine of Mixtral could not say how large its weights are: no rank shares its router, which is packed too."""
    layer = nn.Module()
    layer.weight, layer.cpu_linear = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False), None
    setattr(layer, f"output_{sizes}", 48), setattr(layer, f"input_{sizes}", 32)
    assert step_bytes.weight_bytes([layer]) == 2 * 48 * 32


# ---- the head -----------------------------------------------------------------------------------------------------


class Target(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)  # 40 tokens and padding
        self.logits_processor = SimpleNamespace(soft_cap=None, scale=1.0)

    def compute_logits(self, x):
        return self.lm_head(x)[:, :40]


def bound(head, draft_weights, target):
    config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1))
    return exit_head.TargetHead(head, target, 40, config, draft_weights)


@pytest.mark.parametrize("ids", [None, torch.tensor([1, 5, 30])])
@pytest.mark.parametrize("translator", [False, True])
def test_a_head_over_lm_head_rows_reads_a_copy_of_them(ids, translator, monkeypatch):
    head = translator_head(weight(64, 64), vocab_ids=ids) if translator else lens_head(ids)
    target = Target()
    copied, shared = bound(head, "fp8", target), bound(head, "shared", target)
    x = weight(3, 64, 1.0)
    rows = 40 if ids is None else 3
    assert copied.logits(x).shape == (3, rows)
    torch.testing.assert_close(copied.logits(x), shared.logits(x), atol=0.1, rtol=0.1)
    assert not copied.reads_lm_head
    copy, bias = copied.copied
    torch.testing.assert_close(copy(x, bias), copied._bound.logits(x))
    assert shared.copied is None and bound(lens_head(None), "shared", target).copied is None
    monkeypatch.setattr(copied_weights, "kernels_of", lambda kind, device: fp8_kernels)  # as on CUDA
    tensors = bound(head, "fp8", target).tensors
    read = step_bytes.weight_bytes([], [tensor for tensor in tensors if tensor.dtype is not torch.bfloat16])
    assert read == rows * (64 + 4) + (0 if ids is None else 8 * rows)


def test_an_lm_head_that_is_not_plain_rows_is_used_as_it_is():
    target = Target()
    target.logits_processor.soft_cap = 30.0
    head = bound(lens_head(), "fp8", target)
    assert head.reads_lm_head
    x = weight(3, 64, 1.0)
    assert head.logits(x).equal(target.compute_logits(x))


# ---- new weights of the target --------------------------------------------------------------------------------------


class Copied(nn.Module):
    def __init__(self, shared, copied):
        super().__init__()
        self.norm = shared
        self.copy = nn.Linear(2, 2, bias=False)
        self.copy.weight.data.fill_(copied)
        self.register_buffer("scale", torch.tensor([float(copied)]))


def test_tensors_of_its_own_are_filled_where_they_are():
    norm = nn.LayerNorm(2)
    old, new = Copied(norm, 1.0), Copied(norm, 3.0)
    places = old.copy.weight.data_ptr(), old.scale.data_ptr()
    with torch.inference_mode():
        refill(old, new)
    assert old.norm is norm
    assert old.copy.weight.tolist() == [[3.0, 3.0], [3.0, 3.0]] and old.scale.tolist() == [3.0]
    assert places == (old.copy.weight.data_ptr(), old.scale.data_ptr())  # CUDA graphs hold them


def test_a_load_past_vllms_own_calls_is_noticed():
    loaded = []
    model = nn.Module()
    model.load_weights = lambda weights: loaded.extend(weights) or {"names"}
    watch = Watch(model)
    assert not watch.stale
    assert model.load_weights([1]) == {"names"} and loaded == [1]
    assert watch.stale


def test_sleep_drops_nothing_that_new_weights_do_not_bring_back():
    levels = []
    sleep = keep_weights_asleep(lambda worker, level=1: levels.append(level))
    ours = SimpleNamespace(speculator=SimpleNamespace(renew=None))
    others = SimpleNamespace(speculator=SimpleNamespace())
    for runner in (ours, others, SimpleNamespace()):
        worker = SimpleNamespace(model_runner=runner)
        sleep(worker)
        sleep(worker, 2)
        sleep(worker, level=0)
    assert levels == [1, 1, 0, 1, 2, 0, 1, 2, 0]
