"""Greedy drafting on the V2 runner changes no token: gates, lengths, views and requests, changed on live engines."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from fixed_times import fix_times
from harness import Counts, Live, change_everything, differing, greedy, layer_skip, live, ragged_prompts, tokens
from models import LAYERS, VOCAB, save_tiny
from test_gates_live import by_reference, rounds_of

from selfspec_cli.early_exit.draft_log import DraftLog
from selfspec_cli.early_exit.reference import Round
from selfspec_cli.vllm_plugin import spec_config
from selfspec_cli.vllm_plugin.v2 import draft_loop
from selfspec_cli.vllm_plugin.v2.scheduling import planner_of
from selfspec_cli.vllm_plugin.weights.copied import CopiedWeight

K, FREE = 5, 8
SMALL: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_memory_bytes": 2**25}
PROMPTS = [
    (prompt[:15] * 9)[:100] if number == 2 else prompt for number, prompt in enumerate(ragged_prompts(6, VOCAB, seed=8))
]
"""Six for four places, so that requests wait and join; one says the same again and again."""
LENGTHS = [24, 10, 20, 16, 12, 18]


def parameters(**asked: Any) -> list[Any]:
    """asked: by every second request."""
    return [greedy(length, **({} if number % 2 else asked)) for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def plain(model_dir) -> list[list[int]]:
    with live(model_dir("llama"), **SMALL) as engine:
        assert engine.llm.llm_engine.vllm_config.use_v2_model_runner
        return tokens(engine.generate(PROMPTS, parameters()))


@pytest.fixture(scope="module")
def drafting(plain, model_dir) -> Iterator[Live]:
    with live(model_dir("llama"), layer_skip(LAYERS // 2, K), **SMALL) as engine:
        yield engine


@pytest.fixture(autouse=True)
def as_started(request):
    if "drafting" in request.fixturenames:
        engine = request.getfixturevalue("drafting")
        engine.call("early_exit_set_gate", "none", None)
        engine.call("early_exit_set_draft_length", K)


def same(engine: Live, plain: list[list[int]], few: int = len(PROMPTS)) -> Counts:
    """Generate, compare, and give vLLM's counts; drafts were made, some accepted and some not. few: of the prompts."""
    made = engine.gives(PROMPTS[:few], parameters()[:few], plain[:few])
    made.require_both_verdicts()
    return made


def planner(engine: Live) -> Any:
    """What plans the widths of its steps."""
    return planner_of(engine.llm.llm_engine.engine_core.engine_core.scheduler)


def before_the_end(rounds: list[Round], length: int) -> tuple[Round, ...]:
    """Rounds of the reference without the drafts that would lie beyond `length` tokens: the V2 runner makes none."""
    kept, generated = [], 1
    for each in rounds:
        drafted = min(each.drafted, length - generated - 1)
        if drafted > 0:
            kept.append(Round(drafted, min(each.accepted, drafted)))
        generated += each.accepted + 1
    return tuple(kept)


@pytest.mark.parametrize("threshold", [None, 0.3])
def test_every_round_is_the_references(drafting, plain, model_dir, threshold):
    """Outputs stay the same whatever is drafted, so a fault that only makes drafts worse is seen here."""
    drafting.call("early_exit_set_gate", *(("none", None) if threshold is None else ("maxp", threshold)))
    drafting.call("early_exit_record", True)
    same(drafting, plain, few=3)
    log = DraftLog.from_plain(drafting.call("early_exit_recorded"), K)
    drafting.call("early_exit_record", False)
    made = by_reference(model_dir("llama"), LAYERS // 2, K, threshold, PROMPTS[:3], LENGTHS[:3])
    expected = {before_the_end(rounds, length) for (_, rounds), length in zip(made, LENGTHS, strict=False)}
    assert {tuple(rounds_of(log, number)) for number in range(3)} == expected


def test_everything_changes_in_the_middle_of_a_generation(drafting, plain):
    before = drafting.counts()
    outputs = drafting.step_through(PROMPTS, parameters(), change_everything(drafting, K))
    drafting.call("early_exit_set_length_table", None)
    drafting.call("early_exit_record", False)
    assert not differing(tokens(outputs), plain)
    (drafting.counts() - before).require_both_verdicts()


def test_an_aborted_request_leaves_the_others_as_they_are(drafting, plain):
    steps = count()

    def abort(names: list[str]) -> None:
        step = next(steps)
        if step in (3, 6):
            drafting.llm.llm_engine.abort_request([names[step // 3]])

    outputs = drafting.step_through(PROMPTS, parameters(), abort)
    left = [number for number, output in enumerate(outputs) if number not in (1, 2)]
    assert not differing(tokens([outputs[number] for number in left]), [plain[number] for number in left])
    same(drafting, plain, few=3)


def test_copies_of_all_layers_with_prompt_lookup_and_preemption(model_dir, plain):
    """Nine blocks for four requests of up to five: some are thrown out and computed again."""
    spec = layer_skip(LAYERS, 3, draft_weights="int4", free_drafts=FREE)
    with live(model_dir("llama"), spec, **SMALL | {"kv_cache_memory_bytes": 9 * 2**16}, max_model_len=256) as engine:
        fix_times(planner(engine).rule)
        same(engine, plain)
        counted = engine.call("early_exit_counters")
        assert engine.metric("num_preemptions") > 0
    assert counted["drafted"] > 0 < counted["free_accepted"] <= counted["free_drafted"]


class Held:
    """In the place of the kernel for all layers: it holds copies, and leaves every step to the trunk."""

    most = 64  # requests

    def __init__(self, decoder: Any, layers: list[Any], copied: Any, config: Any, device: Any, alone: bool) -> None:
        self.copied, self.alone, self.asked, self.renewed = copied, alone, 0, list[bool]()
        self._before = [copy.weight.clone() for number in range(len(layers)) for copy in self._of(number)]
        self.copies = torch.cat([weight.flatten() for weight in self._before])

    def _of(self, number: int) -> list[CopiedWeight]:
        return [part for part in self.copied(number).modules() if isinstance(part, CopiedWeight)]

    def __call__(self, num_tokens: int, buffers: Any) -> None:
        self.asked += 1

    def renew(self, copies: bool) -> None:
        self.renewed.append(copies)
        now = [copy.weight for number in range(LAYERS // 2) for copy in self._of(number)]
        assert not any(map(torch.equal, now, self._before))  # made of the current weights

    def read_by_a_step(self) -> list[torch.Tensor]:
        return [self.copies]


def test_a_kernel_for_all_layers_is_all_that_holds_copies_and_other_steps_are_on_the_targets_weights(
    model_dir, tmp_path, plain, monkeypatch
):
    held: list[Held] = []
    monkeypatch.setattr(draft_loop, "all_on_own_weights", lambda layers: len(layers) == LAYERS // 2)
    monkeypatch.setattr(draft_loop, "fused_step", lambda *a, **more: held.append(Held(*a, **more)) or held[-1])
    other, spec = save_tiny("llama", tmp_path / "other", seed=1), layer_skip(LAYERS // 2, 3, draft_weights="int4")
    with live(model_dir("llama"), spec, **SMALL, enable_prefix_caching=False) as engine:
        same(engine, plain, few=3)
        drafter = engine.runner.speculator
        trunk, head = list(drafter.model.modules()), sum(tensor.nbytes for tensor in drafter.head.tensors)
        copies = held[0].copies.nbytes
        weights, step = engine.call("early_exit_weights"), engine.call("early_exit_step_bytes")
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        changed = tokens(engine.generate(PROMPTS[:3], parameters()[:3]))
    assert len(held) == 1 and held[0].alone and held[0].asked > 0 and held[0].renewed == [True]
    assert not any(isinstance(part, CopiedWeight) for part in trunk)
    assert weights["draft"] == step["draft"] == copies + head
    assert changed != plain[:3]


def test_prompt_lookup_alone_drafts_what_the_text_repeats(model_dir, plain):
    """What the one line does where no copies fit. No draft step exists, and the rule counts none."""
    with live(model_dir("llama"), {"method": "selfspec", "draft_weights": "none"}, **SMALL) as engine:
        fix_times(planner(engine).rule)
        same(engine, plain)
        counted = engine.call("early_exit_counters")
        assert counted["drafted"] == counted["steps"] == 0 < counted["free_accepted"]
        assert len(planner(engine).steps) > 1


def test_the_one_line_chooses_widths_and_gate_auto_is_left_and_taken_again(model_dir, plain):
    """Everything is chosen: 4-bit copies of all layers, up to 12 drafts, prompt lookup, and when a step pays. With
    another gate every step has all slots. In the interpreter a kernel's time says nothing, so times are fixed."""
    with live(model_dir("llama"), {"method": "selfspec"}, **SMALL) as engine:
        steps, rule = planner(engine).steps, planner(engine).rule
        fix_times(rule)
        same(engine, plain)
        assert len([width for width in steps if width]) > 1 and rule.choices > 5
        assert sum(rule.acceptance.stood) > 0 < sum(rule.acceptance.failed)
        counted = engine.call("early_exit_counters")
        assert counted["drafted"] > 0 < counted["free_accepted"]
        worth = engine.runner.speculator.state.worth
        assert float(worth.counts[1].sum()) > float(worth.first[1].sum())  # confidences of drafts were judged
        assert float(worth.step_value) > 0
        found = {}
        for gate, threshold in (("none", None), ("maxp", 0.3), ("auto", None)):
            engine.call("early_exit_set_gate", gate, threshold)
            steps.clear()
            before = rule.choices
            same(engine, plain, few=3)
            found[gate] = {width for width, number in steps.items() if number}
        assert found["none"] == found["maxp"] == {12}
        assert found["auto"] != {12} and rule.choices > before


def test_a_request_whose_gate_closed_has_no_blocks_before_its_first_with_attention_in_chunks(tmp_path, monkeypatch):
    """Llama 4 attends within 8,192 tokens. Where the context is shorter, such an engine on a GPU ended with the first
    request that drafted no more ("index out of bounds"). There the backend can go on with a step's metadata."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    monkeypatch.setattr(CPUAttentionMetadataBuilder, "supports_draft_decode_metadata_update", True)
    monkeypatch.setattr(CPUAttentionMetadataBuilder, "update_draft_decode_metadata", lambda *_: None)
    folder = save_tiny("llama4", tmp_path / "llama4", attention_chunk_size=1024)
    short, spec = {**SMALL, "max_model_len": 256}, layer_skip(6, 3, gate="maxp", tau=0.3)
    with live(folder, **short) as engine:
        plain = tokens(engine.generate(PROMPTS[:3], parameters()[:3]))
        assert 1024 in chunks_of(engine)
    with live(folder, spec, **short) as engine:  # no context is longer than a chunk: the same without them
        assert chunks_of(engine) == {None}
        same(engine, plain, few=3)
    monkeypatch.setattr(spec_config, "_leave_out_chunks", lambda _: None)  # as where the longest context is found later
    with live(folder, spec, **short) as engine:
        assert 1024 in chunks_of(engine)
        same(engine, plain, few=3)


def chunks_of(engine):
    """Tokens of the chunks in which layers attend; None: to all of the context."""
    layers = engine.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return {getattr(layer, "attention_chunk_size", None) for layer in layers}
