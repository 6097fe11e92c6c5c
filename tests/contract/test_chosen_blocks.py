"""Drafts over the blocks with the greatest attention: which blocks, by whose keys and queries, and for which models."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec

from selfspec_cli.early_exit.contexts import Context
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.vllm_plugin.contexts import kernel_for
from selfspec_cli.vllm_plugin.contexts.blocks import Blocks, chosen_blocks, only
from selfspec_cli.vllm_plugin.v1.proposer import _EarlyExit

BLOCKS = Context("blocks", (256,))
SIZE, COLUMNS, HEADS, SHARED, DIM = 32, 7, 2, 3, 64


class CpuLayer:
    """An attention layer of vLLM's for CPUs, as far as its KV cache is concerned, with random keys in it."""

    def __init__(self, isa: str = "vec", dtype: torch.dtype = torch.float32, requests: int = 4):
        self.isa, self._k_scale_float, self._v_scale_float = isa, 1.0, 1.0
        self.impl = object.__new__(CPUAttentionBackendImpl)
        self.impl.attn_type, self.impl.kv_cache_dtype, self.impl.scale = "decoder", "auto", DIM**-0.5
        self.attn_backend, self.kv_cache_dtype = SimpleNamespace(get_name=lambda: "CPU_ATTN"), "auto"
        self.kv_sharing_target_layer_name, self.num_heads, self.head_size = None, HEADS * SHARED, DIM
        draw, count = torch.Generator().manual_seed(0), requests * COLUMNS
        self.kv_cache = torch.zeros(count, HEADS, SIZE, 2 * DIM, dtype=dtype)
        self.keys = torch.randn(count, HEADS, SIZE, DIM, generator=draw).to(dtype)  # by block
        self.table = torch.randperm(count, generator=draw).int().view(requests, COLUMNS)
        tokens = self.keys.transpose(1, 2).reshape(-1, HEADS, DIM)
        slots = torch.arange(count * SIZE)
        self.impl.do_kv_cache_update(self, tokens, -tokens, self.kv_cache, slots)


def expected(layer: CpuLayer, queries: torch.Tensor, lengths: list[int], tokens: int) -> list[list[int]]:
    """Columns that are kept of each request, token by token from the definition."""
    found = []
    for row, length in enumerate(lengths):
        shares = torch.zeros(COLUMNS)
        known = length - 1
        for head in range(HEADS * SHARED):
            keys = layer.keys[layer.table[row].long(), head // SHARED].flatten(0, 1)[:known].float()
            share = (keys @ queries[row, head].float() * DIM**-0.5).softmax(0)
            for place in range(known):
                shares[place // SIZE] += share[place]
        in_use = range((length - 1) // SIZE + 1)
        last = [block for block in in_use if block >= (length - tokens // 4) // SIZE]
        between = [block for block in in_use if block and block not in last]
        best = sorted(between, key=lambda block: -float(shares[block]))[: max(1, (tokens - tokens // 4) // SIZE)]
        found.append(sorted({0, *best, *last}))
    return found


@pytest.mark.parametrize("tokens", [16, 64, 128, 160, 1024])
@pytest.mark.parametrize(("isa", "dtype"), [("vec", torch.float32), ("vec", torch.bfloat16), ("vec16", torch.float32)])
def test_blocks_with_the_greatest_attention_are_kept_with_the_first_and_the_last_ones_in_their_order(
    isa, dtype, tokens
):
    """Requests of unequal length: one shorter than what is kept, one whose last block is the table's last column. Keys
    lie in the cache as vLLM's own kernel for CPUs puts them there."""
    layer, lengths = CpuLayer(isa, dtype), [2, 70, 161, COLUMNS * SIZE]
    queries = torch.randn(4, HEADS * SHARED, DIM, generator=torch.Generator().manual_seed(1)).to(dtype) * 3
    made = Blocks(tokens)
    made.layer, made.queries = layer, queries
    short, left_out = made.shortened(layer.table, torch.tensor(lengths), SIZE)
    assert short.shape == layer.table.shape and short.dtype == torch.int32
    for row, columns in enumerate(expected(layer, queries, lengths, tokens)):
        assert short[row, : len(columns)].tolist() == layer.table[row, columns].tolist()
        assert int(left_out[row]) == SIZE * ((lengths[row] - 1) // SIZE + 1 - len(columns))
        assert lengths[row] - int(left_out[row]) <= made.longest(SIZE)
    if tokens == 1024:
        assert not left_out.any()
    # Some rows of the batch, later in the round: each with its own query, at the same blocks.
    rows = torch.tensor([3, 1])
    some, _ = made.shortened(layer.table[rows], torch.tensor(lengths)[rows], SIZE, rows)
    for place, row in enumerate(rows.tolist()):
        kept = (lengths[row] - int(left_out[row]) - 1) // SIZE + 1
        assert some[place, :kept].tolist() == short[row, :kept].tolist()


def test_columns_into_which_drafts_are_written_follow_the_newest_block():
    """A request may draft across the end of its newest block; what comes after that is in the table already."""
    table = torch.arange(10, 20, dtype=torch.int32).unsqueeze(0)
    weights = torch.zeros(1, 1, 10)
    weights[0, 0, 3] = 5.0
    kept = chosen_blocks(weights, torch.tensor([8 * 4]), 4, 1, 4)
    assert only(table, kept)[0, :6].tolist() == [10, 13, 17, 18, 19, 0]


def layer(backend: str = "FLASH_ATTN", **more: object) -> SimpleNamespace:
    def forward(own, query, key):
        return ("attended", own, query, key)

    return SimpleNamespace(
        attn_backend=SimpleNamespace(get_name=lambda: backend),
        impl=SimpleNamespace(forward=forward),
        num_heads=2,
        head_size=4,
        **{"kv_cache_dtype": "auto", "kv_sharing_target_layer_name": None, **more},
    )


def kernel(layers: dict[str, object], context: Context = BLOCKS, measures: bool = True, max_model_len: int = 32768):
    """The kernel of a context, in an engine with these layers, of which a to d draft."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
    group = SimpleNamespace(kv_cache_group_id=0, kv_cache_spec=spec)
    engine = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
        device_config=SimpleNamespace(device=torch.device("cpu")),
        model_config=SimpleNamespace(dtype=torch.float32, max_model_len=max_model_len),
    )
    return kernel_for(context, [group], {"b", "d", "c", "a"}, engine, measures)


def test_one_layer_three_quarters_of_the_way_through_those_that_draft_keeps_its_queries():
    layers = {name: layer() for name in ("other", "a", "b", "c", "d", "later")}
    made = kernel(layers)
    assert made.layer is layers["d"] and not hasattr(layers["c"].impl, "selfspec_queries")
    query = torch.arange(5 * 8.0).view(5, 2, 4)
    assert layers["d"].impl.forward("layer", query, "key") == ("attended", "layer", query, "key")
    made.begin(torch.tensor([2, 5]), torch.tensor([0, 2]))
    assert torch.equal(made.queries, query[[1, 2]])
    # The same layer goes on for another number of tokens; a step of more tokens than there may be keeps the first.
    assert kernel(layers).kept is made.kept
    layers["d"].impl.forward("layer", torch.ones(9, 2, 4), None)
    assert made.kept.sum() == 8 * 8
    made.begin(torch.tensor([1]), torch.tensor([0]))
    assert torch.equal(made.queries, torch.ones(1, 2, 4))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"backend": "FLASHMLA"}, r"FLASHMLA \(auto\); allowed: FLASH_ATTN, CPU_ATTN"),
        ({"kv_cache_dtype": "fp8"}, r"FLASH_ATTN \(fp8\)"),
        ({"kv_sharing_target_layer_name": "a"}, "cannot be read"),
    ],
)
def test_keys_that_cannot_be_read_are_refused(wrong, said):
    with pytest.raises(SettingsError, match=f"draft_context = blocks:256 is not supported for this model.*{said}"):
        kernel({name: layer(**wrong) for name in "abcd"})
    assert kernel({name: layer(**wrong) for name in "abcd"}, Context("auto")) is None


def test_auto_chooses_blocks_where_it_is_known_what_reading_the_context_takes():
    layers = {name: layer() for name in "abcd"}
    assert kernel(layers, Context("auto")).tokens == 1024
    of_experts = layers["a"], SimpleNamespace(), SimpleNamespace()  # modules of a mixture of experts are among them
    assert kernel(dict(zip("abc", of_experts, strict=True)), Context("auto")).layer is layers["a"]
    assert kernel(layers, Context("auto"), measures=False) is None
    assert kernel(layers, Context("auto"), max_model_len=32769) is None  # no GPU has run longer block tables
    assert kernel(layers, max_model_len=32769).tokens == 256
    assert kernel(layers, Context()) is None


def test_the_v1_proposer_says_which_tokens_of_the_targets_pass_are_the_newest():
    """Rows with rejected drafts, with none, and inside a prefill, where no token was sampled."""

    def stop(*_: object) -> None:
        raise InterruptedError

    passed: list[list[int]] = []
    context = SimpleNamespace(begin=lambda ends, rejected: passed.append((ends - 1 - rejected).tolist()))
    proposer = SimpleNamespace(
        runner=SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a", "b", "c"], num_reqs=3)),
        free=None,
        lengths=SimpleNamespace(verdict=lambda *_: None),
        recorder=None,
        draft_length=3,
        _context=context,
        worth=None,
        _weights=SimpleNamespace(stale=False),
        _start=stop,
        _sampled=[[5], [7, 8, 9], []],
        _verified=[3, 2, 0],
    )
    common = SimpleNamespace(query_start_loc=torch.tensor([0, 4, 7, 15, 15]))
    for _ in range(2):
        with pytest.raises(InterruptedError):
            _EarlyExit.propose(proposer, 3, sampling_metadata=None, common_attn_metadata=common)
        proposer._sampled, proposer._verified = [[5], [7], []], None  # a step without drafts
    assert passed == [[0, 6, 14], [3, 6, 14]]
