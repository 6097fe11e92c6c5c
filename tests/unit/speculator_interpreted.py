"""The V2 speculator on the CPU, its own kernels in Triton's interpreter; vLLM's graphs are stood in for.

Run by test_v2_kernels.py in a process of its own."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from transformers import LlamaConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu.attn_utils import AttentionCGSupportInfo
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.rule import Choice
from selfspec_cli.vllm_plugin import register
from selfspec_cli.vllm_plugin.overrides import overriding
from selfspec_cli.vllm_plugin.v2 import draft_loop
from selfspec_cli.vllm_plugin.v2 import speculator as v2
from selfspec_cli.vllm_plugin.v2.kernels import EndStep
from selfspec_cli.vllm_plugin.v2.runner import tell_speculator, with_short_drafts

K, VOCAB, REQUESTS = 4, 40, 3
WINDOW, BLOCK = 16, 4  # tokens
BY_BATCH_SIZE = [[1, 1, 4], [2, 2, 2], [3, 3, 0]]  # draft lengths


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """vLLM's configuration of an engine with early exit, by the keys of its speculative_config."""
    register()
    folder = tmp_path_factory.mktemp("model")
    layers = {"num_hidden_layers": 4, "num_attention_heads": 1, "num_key_value_heads": 1}
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 128}
    LlamaConfig(architectures=["LlamaForCausalLM"], **layers, **sizes).save_pretrained(folder)

    def create(**spec):
        spec = {"method": "layer_skip", "layer_skip": 1, "num_speculative_tokens": K, **spec}
        return EngineArgs(
            str(folder), skip_tokenizer_init=True, dtype="float32", max_num_seqs=REQUESTS, speculative_config=spec
        ).create_engine_config()

    return create


def start(config):
    """The speculator of another engine, made as vLLM makes it but on the CPU, and the engine's request state."""
    text = SimpleNamespace(gpu=torch.zeros(REQUESTS, 128, dtype=torch.int32))
    requests, gpu = SimpleNamespace(all_token_ids=text), torch.device("cuda")
    original, made = pytest.fail, v2.EarlyExitSpeculator  # vLLM's own speculators are for engines without early exit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v2, "EarlyExitSpeculator", lambda config, device, *more: made(config, torch.device("cpu"), *more))
        return v2.init_with_early_exit(original)(config, gpu, requests), requests


# ---- what the verifier gets -----------------------------------------------------------------------------------------


class Sampler:
    """In place of vLLM's rejection sampler: returns the invalid drafts that it gets."""

    def __init__(self, requests):
        self.sampler = SimpleNamespace(req_states=requests)

    def __call__(self, logits, input_batch, draft_logits=None, invalid_drafts=None):
        return invalid_drafts


def verified(requests, invalid=None):
    """Which places of a verify pass over requests 0 and 1, with two drafts each, are said to be no drafts."""
    batch = SimpleNamespace(
        expanded_idx_mapping=torch.tensor([0, 0, 0, 1, 1, 1]),
        expanded_local_pos=torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32),
    )
    found = overriding(Sampler, {"__call__": with_short_drafts})(requests)(None, batch, None, invalid)
    return None if found is None else found.int().tolist()


def test_two_engines_in_one_process_verify_their_own_drafts(config):
    (one, its_requests), (other, other_requests) = start(config()), start(config())
    one.state.lengths[:] = torch.tensor([2, 0, 0])
    other.state.lengths[:] = torch.tensor([0, 1, 0])
    assert verified(its_requests) == [0, 0, 0, 0, 1, 1]
    assert verified(other_requests) == [0, 1, 1, 0, 0, 1]
    # An engine without early exit, started last, changes nothing for them and has no such places.
    v2.init_with_early_exit(lambda *arguments: None)(
        SimpleNamespace(speculative_config=None, additional_config={}), None, without := SimpleNamespace()
    )
    assert verified(without) is None
    assert verified(its_requests) == [0, 0, 0, 0, 1, 1]
    by_a_grammar = torch.tensor([0, 1, 1, 0, 0, 0], dtype=torch.bool)  # forbidden, which they stay
    assert verified(its_requests, by_a_grammar) == [0, 1, 1, 0, 1, 1]


# ---- a draft length for each batch size -----------------------------------------------------------------------------


class Graphs:
    """In place of vLLM's captured graphs: one holds a loop over draft steps that ends on the device."""

    def __init__(self, speculator):
        self.state, self.replayed, self.attended = speculator.state, [], []
        self.end_step = EndStep(REQUESTS, VOCAB, None, torch.device("cpu"))

    def dispatch(self, num_reqs, num_tokens, uniform_token_count, **unused):
        return BatchExecutionDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=num_tokens, num_reqs=num_reqs)

    def specialize_spec_tokens(self, batch, steps):
        return batch

    def run_fullgraph(self, batch):
        self.replayed.append(batch)
        while int(self.state.progress.active):
            self.attended.append(self.state.buffers.seq_lens[:REQUESTS].tolist())  # of each step
            self.end_step(self.state, torch.randn(REQUESTS, VOCAB))


@pytest.fixture
def drafting(config, monkeypatch):
    """A speculator whose graphs are captured, with a loop that ends on the device."""
    speculator, _ = start(config(num_speculative_tokens_per_batch_size=BY_BATCH_SIZE))
    speculator.decode_cudagraph_manager = Graphs(speculator)
    speculator.supports_decode_metadata_update, speculator._loop = True, object()
    speculator._warm, speculator.attn_groups = True, []
    monkeypatch.setattr(speculator, "_one_step", lambda *arguments: pytest.fail("a draft step outside a graph"))
    monkeypatch.setattr(speculator, "_metadata", lambda *arguments: pytest.fail("metadata are built for eager steps"))
    return speculator


def propose(speculator, requests, lengths=None, sampled=None, rejected=None, **more):
    """lengths: tokens that the target has keys and values for, of each request; 10 of all where it is None. sampled: by
    each, one where it is None; rejected: of the K drafts of each, none where it is None."""
    seq_lens = torch.tensor(lengths or [10] * requests, dtype=torch.int32)
    batch = SimpleNamespace(
        num_reqs=requests,
        num_tokens_after_padding=requests,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        idx_mapping=torch.arange(requests),
        query_start_loc=torch.arange(requests + 1, dtype=torch.int32) * (K + 1),
    )
    sampled = torch.tensor(sampled or [1] * requests, dtype=torch.int32)
    rejected = torch.tensor(rejected or [0] * requests, dtype=torch.int32)
    last = torch.arange(REQUESTS).unsqueeze(1)
    drawing = torch.zeros(REQUESTS), torch.zeros(REQUESTS, dtype=torch.int64)
    return speculator.propose(batch, {}, {}, None, None, sampled, rejected, last, None, *drawing, **more)


def test_the_length_follows_the_batch_from_round_to_round(drafting):
    # The table holds whatever the runner asks for.
    for requests, asked, steps in ((1, 4, 4), (2, 2, 2), (3, 0, 0), (1, 4, 4), (2, K, 2), (3, K, 0)):
        before = drafting.counters.snapshot()["steps"]
        propose(drafting, requests, num_speculative_tokens=asked)
        assert drafting.counters.snapshot()["steps"] - before == steps
        assert drafting.state.lengths[:requests].tolist() == [steps] * requests
    assert len(drafting.decode_cudagraph_manager.replayed) == 5  # none where the runner asks for no drafts


def test_a_live_draft_length_holds_beside_it(drafting):
    drafting.draft_length = 1
    propose(drafting, 2, num_speculative_tokens=2)
    assert drafting.state.lengths.tolist() == [1, 1, 0]
    drafting.draft_length = 3
    propose(drafting, 1)  # a runner that names no number means k
    assert drafting.state.lengths.tolist() == [3, 1, 0]  # the other request was not in this round


def test_the_first_round_without_drafts_takes_in_the_verdict_on_the_last_ones(drafting):
    propose(drafting, 2, num_speculative_tokens=2)
    propose(drafting, 2, num_speculative_tokens=0)
    assert drafting.state.lengths.tolist() == [0, 0, 0]
    assert not drafting.state.inputs.row_steps.any()
    launched = drafting.state.progress.step.fill_(9)  # the next ones launch nothing, and the next draft begins anew
    propose(drafting, 2, num_speculative_tokens=0)
    assert int(launched) == 9
    propose(drafting, 2, num_speculative_tokens=2)
    assert drafting.state.lengths.tolist() == [2, 2, 0]


# ---- the order in which vLLM calls ----------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"draft_window": WINDOW}, {"draft_context": "blocks:64"}, {"free_drafts": 9}])
def test_the_profiling_run_drafts_before_there_is_a_kv_cache(config, monkeypatch, more):
    """No attention groups, no block tables and no graphs: vLLM calls `set_attn` after it (vllm_says.toml)."""
    speculator, _ = start(config(**more))
    stepped, speculator._warm = [], True
    monkeypatch.setattr(speculator, "_one_step", lambda *arguments: stepped.append(arguments[2:4]))
    propose(speculator, REQUESTS, dummy_run=True, skip_attn_for_dummy_run=True, is_profile=True)
    assert stepped == [(None, None)] * K  # without metadata, and without slots


class Group:
    """In place of vLLM's attention group of the layers that draft, and keeps what a round's attention would read."""

    kv_cache_group_id, supports_draft_decode_metadata_update = 0, True

    def __init__(self, buffers):
        self.kv_cache_spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        self.buffers, self.read = buffers, []

    def map_to_kernel_block_table(self, table):
        self.read.append((table.clone(), self.buffers.seq_lens.tolist()))


def attached(speculator, monkeypatch):
    """The attention group of the layers that draft and its block table, after vLLM has called `set_attn`."""
    group, blocks = Group(speculator.input_buffers), 128 // BLOCK
    table = torch.arange(REQUESTS * blocks, dtype=torch.int32).view(REQUESTS, blocks)
    support = AttentionCGSupportInfo()
    monkeypatch.setattr(draft_loop, "init_attn_backend", lambda *arguments, **more: ([[group]], support, [BLOCK]))
    speculator.set_attn(None, None, SimpleNamespace(block_sizes=[BLOCK], input_block_tables=[table]), None, [])
    speculator.decode_cudagraph_manager = Graphs(speculator)
    return group, table


def test_with_a_window_a_graph_is_replayed_on_shortened_block_tables(config, monkeypatch):
    """From the profiling run on, as vLLM calls: then the KV cache, a dummy run with attention, and a round."""
    speculator, _ = start(config(draft_window=WINDOW, gate="auto"))
    speculator._warm, speculator._layer_names = True, set()
    with monkeypatch.context() as patch:
        patch.setattr(speculator, "_one_step", lambda *arguments: None)
        propose(speculator, REQUESTS, dummy_run=True, skip_attn_for_dummy_run=True, is_profile=True)
    group, table = attached(speculator, monkeypatch)
    whole = table.clone()
    propose(speculator, REQUESTS, dummy_run=True)
    propose(speculator, REQUESTS, [60, 30, 10])
    (dummy, nothing), (read, attended) = group.read
    assert torch.equal(dummy, whole)
    assert nothing == [0, 0, 0]
    assert attended == [61 - 10 * BLOCK, 31 - 2 * BLOCK, 11]
    kept = WINDOW // BLOCK + 2  # the window's blocks, and what of a block before and after it is needed
    for row, left_out in enumerate((10, 2, 0)):
        assert read[row, : 1 + kept].tolist() == [whole[row, 0], *whole[row, 1 + left_out :][:kept].tolist()]
    assert max(attended) + K - 1 <= speculator.draft_max_seq_len == WINDOW + 2 * BLOCK + K
    assert speculator.state.lengths.tolist() == [K] * REQUESTS
    speculator.set_choice(Choice(K, 0.0, 0.3, 1.0, 1.0, leaves_out=False))
    table.copy_(whole)  # as vLLM's next step gathers it
    propose(speculator, REQUESTS, [60, 30, 10])
    read, attended = group.read[-1]
    assert torch.equal(read, whole) and attended == [61, 31, 11]
    steps = speculator.decode_cudagraph_manager.attended[-K:]  # nothing is left of what the round before left out
    assert steps == [[61 + step, 31 + step, 11 + step] for step in range(K)]
    speculator.gate.set("none", None)  # with another gate than auto the window holds whatever it costs
    speculator.set_choice(Choice(K, 0.0, 0.3, 1.0, 1.0, leaves_out=False))
    propose(speculator, REQUESTS, [60, 30, 10])
    assert group.read[-1][1] == [61 - 10 * BLOCK, 31 - 2 * BLOCK, 11]


def over_cache(speculator, monkeypatch):
    """The layer's attention, which has a KV cache, and what reads block tables of it, before the first round."""
    blocks, layers = 128 // BLOCK, speculator.vllm_config.compilation_config.static_forward_context
    cache = torch.zeros(REQUESTS * blocks, 1, BLOCK, 2 * 32)
    cache[:, 0, 0, :32] = 9 * torch.nn.functional.one_hot(torch.arange(REQUESTS * blocks) % blocks, 32).float()
    attention = SimpleNamespace(
        attn_backend=SimpleNamespace(get_name=lambda: "FLASH_ATTN"),
        kv_cache_dtype="auto",
        num_heads=1,
        num_kv_heads=1,
        head_size=32,
        kv_sharing_target_layer_name=None,
        kv_cache=cache,
        impl=SimpleNamespace(scale=1.0, forward=lambda *own: None),
    )
    monkeypatch.setitem(layers, "layer", attention)
    monkeypatch.setattr(speculator.vllm_config.device_config, "device", torch.device("cpu"))
    speculator._warm, speculator._layer_names = True, {"layer"}
    return attention, *attached(speculator, monkeypatch)


def test_a_cache_whose_keys_cannot_be_read_is_attended_to_as_a_whole_where_nobody_named_blocks(config, monkeypatch):
    speculator, _ = start(config(draft_context="auto", gate="auto"))
    attention, group, table = over_cache(speculator, monkeypatch)
    assert speculator._context.tokens == 1024
    for measured in (True, False):  # nothing is left out by times that were assumed
        speculator.set_choice(Choice(K, 0.0, 0.3, 1.0, 1.0, leaves_out=True, measured=measured))
        assert speculator._leaves_out is measured
    speculator.set_choice(Choice(K, 0.0, 0.3, 1.0, 1.0))
    attention.num_kv_heads, whole = 2, table.clone()
    propose(speculator, 2, [120, 116], rejected=[1, 0])
    assert speculator._context is None and torch.equal(table, whole)
    ((_, attended),) = group.read
    assert attended[:2] == [120, 117]


def test_blocks_are_chosen_by_the_queries_of_the_newest_tokens_that_have_keys(config, monkeypatch):
    """Each request's last pass was over K + 1 tokens, some of whose drafts were rejected. The queries that the layer
    kept of it say which block to attend to."""
    speculator, _ = start(config(draft_context="blocks:64"))
    attention, group, table = over_cache(speculator, monkeypatch)
    cache, whole = attention.kv_cache, table.clone()
    queries = torch.zeros(REQUESTS * (K + 1), 1, 32)
    queries[K - 1, 0, 20], queries[2 * K + 1, 0, 22] = 9.0, 9.0  # of tokens behind which 1 and 0 drafts were rejected
    attention.impl.forward(attention, queries)
    halves = cache.view(-1, 1, BLOCK // 2, 2 * 32)  # of a block: what vLLM gives a kernel that is for smaller blocks
    for heads, layout in ((2, cache), (1, halves)):
        attention.num_kv_heads, attention.kv_cache = heads, layout
        with pytest.raises(SettingsError, match=r"blocks:64 is not supported for this model.* of FLASH_ATTN \(auto\)"):
            propose(speculator, 2)
    attention.kv_cache = cache
    propose(speculator, 2, [120, 116], rejected=[1, 0])
    ((read, attended),) = group.read
    # Of 64 tokens 16 are the last ones, 12 blocks are chosen, and one is the first.
    left_out = [4 * (25 - 12), 4 * (24 - 12)]
    assert attended[:2] == [120 - left_out[0], 117 - left_out[1]]
    for row, block in enumerate((20, 22)):  # the others get the same attention, so the first ones are taken
        kept = read[row, : 1 + 12].tolist()
        assert kept == [*whole[row, :12].tolist(), int(whole[row, block])]
    assert speculator.draft_max_seq_len == 64 + 2 * BLOCK + K


# ---- what requests ask for -------------------------------------------------------------------------------------------


def asking(**extra):
    own = {f"selfspec_{key}": value for key, value in extra.items()}
    return SimpleNamespace(extra_args=own, max_tokens=None, eos_token_id=None)


def arrived(speculator, requests, drafts=None):
    """vLLM's runner adds new requests, by their slots and SamplingParams. drafts: that are verified in that step."""

    class Runner:
        req_states = SimpleNamespace(req_id_to_index={str(slot): slot for slot in range(REQUESTS)})

        def add_requests(self, output):
            self.added = True

    runner = Runner()
    runner.speculator, runner.cudagraph_manager = speculator, SimpleNamespace()
    new = [SimpleNamespace(req_id=str(slot), sampling_params=one, prompt_len=5) for slot, one in requests.items()]
    tokens = {str(slot): 5 for slot in requests}
    tell_speculator(Runner.add_requests)(
        runner,
        SimpleNamespace(scheduled_new_reqs=new, scheduled_spec_decode_tokens=drafts or {}, num_scheduled_tokens=tokens),
    )
    assert runner.added
    assert runner.cudagraph_manager.step == tokens


def test_new_requests_are_told_to_the_speculator_with_what_they_ask_for(drafting):
    drafting.state.lengths.fill_(4)  # of requests that were there before
    arrived(drafting, {2: asking(k=1), 0: asking(k=0)}, {"1": [-1] * 4})
    assert drafting.state.lengths.tolist() == [0, 4, 0]  # before the verifier reads them
    propose(drafting, 2, num_speculative_tokens=2)
    assert drafting.state.lengths.tolist() == [0, 2, 0]
    arrived(drafting, {0: None})
    propose(drafting, 2, num_speculative_tokens=2)
    assert drafting.state.lengths.tolist() == [2, 2, 0]


def test_the_device_is_told_of_new_requests_when_a_round_begins_and_not_while_nothing_is_drafted(drafting, monkeypatch):
    taken, take_in = [], v2.take_in
    monkeypatch.setattr(v2, "take_in", lambda state, slots, *more: taken.append(slots) or take_in(state, slots, *more))
    propose(drafting, 2, num_speculative_tokens=0)
    assert drafting.drafting_disabled
    drafting.state.lengths.fill_(3)  # of requests that were there before
    arrived(drafting, {0: asking(k=0), 1: asking()})
    arrived(drafting, {0: asking(k=1)})  # in the place of one that has ended meanwhile
    arrived(drafting, {})
    propose(drafting, 2, num_speculative_tokens=0)
    assert not taken
    propose(drafting, 2, num_speculative_tokens=2)
    assert taken == [[0, 1]]
    assert drafting.state.lengths.tolist() == [1, 2, 3]
    propose(drafting, 2, num_speculative_tokens=2)
    assert len(taken) == 1


def test_thresholds_of_requests_are_for_the_gate_that_the_engine_was_started_with(config):
    speculator, _ = start(config(gate="maxp", tau=0.3, length_table="2:3"))
    arrived(speculator, {0: asking(threshold=0.5), 1: asking()}, {"2": [-1]})
    limits = speculator.state.limits.own_limits.tolist()
    assert limits[0] == 0.5
    assert limits[1] != limits[1]
    counted = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v2, "begin_round", lambda *given: counted.append(given[4]))
        speculator._begin(SimpleNamespace(num_reqs=1, idx_mapping=torch.zeros(1)), 3, (), None, None)
        speculator.gate.set("margin", 0.2)
        speculator._begin(SimpleNamespace(num_reqs=1, idx_mapping=torch.zeros(1)), 3, (), None, None)
    assert counted == [True, False]


def test_a_graph_is_captured_for_each_length_only_where_the_loop_cannot_end_on_the_device(drafting, config):
    assert not drafting._length_is_captured
    drafting._loop = None
    assert drafting._length_is_captured
    drafting.supports_decode_metadata_update = False  # a graph of one step, replayed as often as there are drafts
    assert not drafting._length_is_captured
    unscheduled, _ = start(config())
    unscheduled.supports_decode_metadata_update = True
    assert not unscheduled._length_is_captured


# ---- several ranks ---------------------------------------------------------------------------------------------------


class Capturing:
    """In place of vLLM's manager of graphs: what it captures, and at which capture it fails."""

    def __init__(self, fails=()):
        self.graphs, self.pool, self._capture_descs, self.fails, self.loops = {}, "vllm's", {}, fails, []

    def capture(self, record, *arguments, **more):
        self.loops.append(record.__self__._loop)
        self.graphs["one"] = len(self.loops)
        if len(self.loops) in self.fails:
            raise RuntimeError("CUDA: cudaErrorStreamCaptureInvalidated")


def capturing(speculator, monkeypatch, *, reason=None, fails=(), ranks=2):
    """Capture as one of two ranks; the reasons that the log gives for the unrolled form."""
    said, made = [], SimpleNamespace()
    speculator._loop, speculator.supports_decode_metadata_update = None, True
    for name in ("model_state", "block_tables", "kv_cache_config"):
        monkeypatch.setattr(speculator, name, None, raising=False)
    speculator.decode_cudagraph_manager = Capturing(fails)
    monkeypatch.setattr(speculator.vllm_config.parallel_config, "tensor_parallel_size", ranks)
    monkeypatch.setattr(draft_loop.device_loop, "unavailable", lambda: None)
    monkeypatch.setattr(draft_loop.device_loop, "DeviceLoop", lambda device: made)
    monkeypatch.setattr(draft_loop.device_loop, "agreed", lambda mine: mine)
    monkeypatch.setattr(draft_loop.device_loop, "reason_against_a_loop", lambda loop, device: reason)
    monkeypatch.setattr(draft_loop.logger, "warning", lambda text, *words: said.append(text % words))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "another")
    speculator.capture()
    return said, made


@pytest.mark.parametrize("reason", [None, "NCCL"])
def test_ranks_capture_the_loop_where_their_exchange_works_in_it_or_k_steps_and_say_why(drafting, monkeypatch, reason):
    said, made = capturing(drafting, monkeypatch, reason=reason)
    assert said == ([f"drafting always takes all k steps on this device: {reason}"] if reason else [])
    assert drafting.decode_cudagraph_manager.loops == [None if reason else made]


def test_a_loop_that_several_ranks_cannot_capture_is_captured_as_k_steps_in_another_pool(drafting, monkeypatch):
    said, made = capturing(drafting, monkeypatch, fails=[1])
    manager = drafting.decode_cudagraph_manager
    assert manager.loops == [made, None]
    assert manager.pool == "another"
    assert "cudaErrorStreamCaptureInvalidated" in said[0]
    with pytest.raises(RuntimeError):  # one GPU has no reason to fail that is known
        capturing(drafting, monkeypatch, fails=[1], ranks=1)


def test_logits_that_the_kernel_does_not_take_at_once_are_gathered_in_pieces_of_rows():
    """Two ranks, of which the other one has the same logits but negative."""
    sizes = []

    class Communicator:
        ca_comm = SimpleNamespace(should_custom_all_gather=lambda part: part.numel() <= 4)

        def custom_all_gather(self, part):
            if not self.ca_comm.should_custom_all_gather(part):
                return None
            sizes.append(len(part))
            return torch.cat([part, -part])

    part = torch.arange(1.0, 11.0).view(5, 2)
    found = draft_loop.device_loop.gathered(Communicator(), pytest.fail, part)
    assert torch.equal(found, torch.cat([part, -part], dim=-1))
    assert sizes == [2, 1, 2]
    wide, asked = torch.ones(2, 8), []
    draft_loop.device_loop.gathered(Communicator(), lambda *words: asked.append(words), wide)  # not even one row
    draft_loop.device_loop.gathered(Communicator(), lambda *words: asked.append(words), part, 0)
    assert asked == [(wide, 1), (part, 0)]


def test_a_length_without_a_graph_is_drafted_eagerly(drafting, monkeypatch):
    manager, ran, drafting._loop = drafting.decode_cudagraph_manager, [], None
    eager = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.NONE, num_tokens=2, num_reqs=2)
    monkeypatch.setattr(manager, "specialize_spec_tokens", lambda batch, steps: eager)
    monkeypatch.setattr(drafting, "_metadata", lambda *arguments: (None, None))
    monkeypatch.setattr(drafting, "_one_step", lambda *arguments: ran.append(arguments))
    propose(drafting, 2, num_speculative_tokens=1)
    assert len(ran) == 1
    assert not manager.replayed


# ---- gates that cannot run here --------------------------------------------------------------------------------------


def test_a_gate_without_a_device_expression_is_refused_on_cuda_before_the_model_is_loaded(config, monkeypatch):
    monkeypatch.setitem(GATES._found, "cpu_only", replace(GATES["margin"], name="cpu_only", device=None))
    monkeypatch.setattr("vllm.platforms.current_platform.is_cuda", lambda: True)
    with pytest.raises(SettingsError, match=r"'cpu_only' has no device expression.*allowed on CUDA: none, adaedl"):
        config(gate="cpu_only", tau=0.2)
