"""How wide verify passes are planned for the V2 scheduler, and the decode graphs there are; starts no engine."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from v2_engine import K, early_exit, settings
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

from selfspec_cli.early_exit.rule import LARGEST_VERIFY, LengthRule, StepTimes, batch_size
from selfspec_cli.vllm_plugin.hooks import capture_every_width
from selfspec_cli.vllm_plugin.v2 import graphs
from selfspec_cli.vllm_plugin.v2.graphs import with_every_width
from selfspec_cli.vllm_plugin.v2.widths import (
    MOST,
    WidthPlanner,
    decode_sizes,
    mixed_sizes,
    most_requests,
    reach,
    request_counts,
    widths,
)


def planner(**spec):
    return WidthPlanner(settings(**spec), 24)


def step(requests, new=(), finished=()):
    """A step over requests by name: context before it, length with what is known of the prompt, own k."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(extra_args=asked)) for name, asked in new
        ],
        finished_req_ids=set(finished),
        num_scheduled_tokens=dict.fromkeys(requests, 1),
        num_spec_tokens_to_schedule=K,
    )


def running(**contexts):
    return {
        name: SimpleNamespace(num_computed_tokens=context, num_tokens=context + 1) for name, context in contexts.items()
    }


def width_after(plan, output, requests):
    """The width that is planned when the step is scheduled, which has advanced its requests by then."""
    after = {
        name: SimpleNamespace(num_computed_tokens=one.num_computed_tokens + new, num_tokens=one.num_tokens)
        for name, one in requests.items()
        if (new := output.num_scheduled_tokens.get(name)) is not None
    }
    return plan.width(output, after)


def test_free_drafts_have_their_places_while_few_requests_run_and_graphs_for_them():
    for free, wide, all_widths in ((67, 67, (67, 2, 0)), (33, 33, (33, 2, 0)), (3, 4, (4, 2, 0))):
        plan = planner(length_table="2:2 40:0", free_drafts=free)
        few = plan.settings.free_requests
        assert (plan.widths, few) == (all_widths, 136 // (free + 1))
        for load in (1, 2, few, few + 1, 41):
            requests = running(**{f"r{number}": 10 for number in range(load)})
            wanted = 0 if load > 39 else wide if load <= max(few, 1) else 2
            assert width_after(plan, step(requests), requests) == wanted, (free, load)
        assert [most_requests(plan.settings, width, 64) for width in all_widths] == [few, 39, 64]


def test_it_is_that_of_the_longest_draft_that_a_request_may_make():
    plan = planner(length_table="1:2 1@100:0 1@200:4")
    for contexts, width in (((10, 150), 2), ((150, 150), 0), ((150, 250), 4), ((98, 99), 2)):
        requests = running(**{f"r{number}": context for number, context in enumerate(contexts)})
        assert width_after(plan, step(requests), requests) == width


def test_steps_without_drafts_are_counted_by_what_switched_them_off():
    plan = planner(length_table="1@100:0 4:0")
    off, no_drafts = plan.off, {"selfspec_k": 0}
    requests = running(a=10, b=150, c=10) | {"new": SimpleNamespace(num_computed_tokens=0, num_tokens=64)}
    width_after(plan, step(dict.fromkeys("abc"), new=[("c", no_drafts)]), requests)
    assert off == {"load": 0, "context": 1, "request": 1, "cost": 0}
    assert plan.landed() == {"off": off, "in_force": 4, "steps_of_width": {4: 1}}
    width_after(plan, step(requests), requests)  # the fourth is inside its prefill
    assert off == {"load": 3, "context": 1, "request": 1, "cost": 0}
    assert plan.landed()["in_force"] == 0


def test_where_the_load_alone_decides_a_prefill_is_told_by_its_many_tokens():
    plan = planner(length_table="3:0")
    requests = running(a=10, b=10, c=10)
    width_after(plan, step(requests), requests)
    assert plan.off["load"] == 3
    filling = step(requests)
    filling.num_scheduled_tokens["c"] = 40
    width_after(plan, filling, requests)
    assert plan.off["load"] == 5


def refuse(plan, requests, steps=400):
    """Verdicts come in of which none stands, and every draft step costs as much as a plain step."""
    now = 0.0
    plan.rule.clock = lambda: now
    planned = []
    for _ in range(steps):
        output = step(requests)
        width = width_after(plan, output, requests)
        if width:
            plan.rule.judged([len(requests)] + [0] * (plan.rule.acceptance.k - 1), [0] * plan.rule.acceptance.k)
        now += 0.01 * (1 + width)
        plan.rule.stepped(len(requests), width, 0.01 * (1 + width))
        planned.append(width)
    return planned


def test_a_batch_that_drafts_cost_is_counted_but_for_whom_something_else_switches_off():
    plan = planner(gate="auto")
    requests = running(a=10, b=10, c=10)
    width_after(plan, step(requests, new=[("c", {"selfspec_k": 0})]), requests)
    refuse(plan, requests)
    while width_after(plan, step(requests), requests):
        pass
    plan.off.update(dict.fromkeys(plan.off, 0))
    assert width_after(plan, step(requests), requests) == 0
    assert plan.off == {"load": 0, "context": 0, "request": 1, "cost": 2}
    requests["d"] = SimpleNamespace(num_computed_tokens=0, num_tokens=64)
    ends_its_prefill = step(requests, new=[("d", {"selfspec_k": 0})])
    ends_its_prefill.num_scheduled_tokens |= {"a": 64, "b": 64, "d": 64}
    width_after(plan, ends_its_prefill, requests)
    assert min(plan.off.values()) >= 0  # a counter takes nothing negative


def test_where_every_request_opts_out_nothing_is_planned_and_a_shorter_wish_takes_the_next_width():
    plan = planner(length_table="100:2")
    requests = running(a=10, b=10)
    off = {"selfspec_k": 0}
    assert width_after(plan, step(requests, new=[("a", off), ("b", off)]), requests) == 0
    requests |= running(c=10)
    assert width_after(plan, step(requests, new=[("c", {"selfspec_k": 1})]), requests) == 2
    requests |= running(d=10)
    beyond_k = {"selfspec_k": 99}  # came past the check, and counts for nothing
    assert width_after(plan, step(requests, new=[("d", beyond_k)]), requests) == 4
    del requests["c"], requests["d"]
    assert width_after(plan, step(requests, finished=["c", "d"]), requests) == 0
    assert set(plan._own) == {"a", "b"}


def test_without_acceptance_nothing_is_planned():
    plan, requests = planner(gate="auto"), running(a=10, b=10)
    planned = refuse(plan, requests)
    assert any(planned[:50])
    assert planned[50:].count(0) > 0.9 * len(planned[50:])
    assert plan.steps[0] == planned.count(0) and plan.landed()["steps_of_width"] == dict(plan.steps)


def test_a_gate_that_is_set_on_the_live_engine_gives_the_table_back_its_widths():
    plan, requests = planner(gate="auto", length_table="3:2"), running(a=10, b=10)
    refuse(plan, requests)
    plan.chooses_width = False
    assert width_after(plan, step(requests), requests) == K
    requests |= running(c=10)
    assert width_after(plan, step(requests), requests) == 2
    plan.chooses_width = True
    assert {width_after(plan, step(requests), requests) for _ in range(40)} <= {0, 2}


def test_the_times_that_the_engine_measured_are_read_with_the_first_step():
    times, asked = StepTimes({4: {1: 1.0}, 0: {1: 1.0}}, {1: 9.0}), []
    plan = WidthPlanner(settings(gate="auto"), 24, lambda: asked.append(1) or times)
    assert not plan.rule.times.measured and not asked
    requests = running(a=10)
    assert [width_after(plan, step(requests), requests) for _ in range(3)] == [0, 0, 0]  # a draft step is far too dear
    assert plan.rule.times is times and len(asked) == 1


def decoded(names, drafts, prefill="", new=()):
    """A step that was scheduled for `names` with `drafts` drafts each, as `read` takes it. prefill: requests with 64
    tokens of their prompts; new: those that came with this step."""
    scheduled = dict.fromkeys(names, 1 + drafts) | dict.fromkeys(prefill, 64)
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=list(new),
        scheduled_spec_decode_tokens={name: [0] * drafts for name in names} if drafts else {},
    )


def test_a_step_between_two_others_of_its_batch_size_says_what_it_takes_and_with_how_much_of_prompts():
    plan, taken, brought = planner(gate="auto"), [], []
    plan.rule.stepped = lambda *step: taken.append(step)
    plan.rule.brought = lambda *step: brought.append(step)
    plan.read(decoded("ab", 4), 1.0)  # the first
    plan.verdict(3)
    plan.verdict(2)
    plan.read(decoded("ab", 4), 1.5)
    plan.read(decoded("ab", 0), 1.75)
    plan.read(decoded("abc", 0), 2.0)  # after a smaller batch
    plan.verdict(1)
    plan.read(decoded("ab", 4, prefill="c", new="c"), 3.0)
    plan.in_force = 0
    plan.read(decoded("abc", 0), 3.25)
    plan.read(decoded("", 0, prefill="def", new="def"), 9.0)  # all others had ended, perhaps long ago
    assert taken == [
        (2, 4, 0.5, 0, 2.5, plan.widest),
        (2, 0, 0.25, 0, 0.0, plan.widest),
        (3, 4, 1.0, 63, 1 / 3, plan.widest),
        (3, 0, 0.25, 0, 0.0, 0),
    ]
    assert brought == [(2, 4, 2.5), (3, 4, 1.0)]


def test_totals_by_position_are_joined_with_those_before():
    plan, heard = planner(gate="auto"), []
    plan.rule.judged = lambda judged, stood: heard.append((judged, stood))
    for judged, stood in (([4, 3, 0, 0], [3, 1, 0, 0]), ([9, 5, 1, 0], [5, 2, 1, 0])):
        totals = {f"judged_at.{place}": number for place, number in enumerate(judged)}
        plan.counted(totals | {f"stood_at.{place}": number for place, number in enumerate(stood)})
    plan.counted({"rounds": 7})
    assert heard == [([4, 3, 0, 0], [3, 1, 0, 0]), ([5, 2, 1, 0], [2, 1, 1, 0])]


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def manager(configured, monkeypatch):
    """Make vLLM's manager with our widths, of an engine for eight requests and with four query heads a KV head. spec:
    keys of its speculative_config; None: it does not draft. sizes: of its graphs."""
    for name in ("get_pp_group", "current_platform"):
        monkeypatch.setattr(cudagraph_utils, name, Mock())

    def made(spec, mode=CUDAGraphMode.FULL_AND_PIECEWISE, sizes=(1, 2, 4, 5, 8, 10, 16, 20, 24, 32, 40), **more):
        if spec is not None:
            spec = {"method": "layer_skip", "num_speculative_tokens": K, **spec}
        config = configured(spec, max_num_seqs=8, hf_overrides={"num_key_value_heads": 1})
        chosen = config.compilation_config
        chosen.cudagraph_capture_sizes, chosen.max_cudagraph_capture_size = list(sizes), sizes[-1]
        kind, tokens = with_every_width(ModelCudaGraphManager), 1 + config.num_speculative_tokens
        planned = kind(config, torch.device("cpu"), mode, tokens, **more)
        planned._graphs_captured = True
        return planned

    return made


def graph_of(manager, requests, drafts):
    found = manager.dispatch(requests, requests * (1 + drafts), 1 + drafts, 0)
    return found.cg_mode.name, found.num_tokens, found.uniform_token_count


def joined(manager, *tokens):
    """The graph of a step in which each request has that many `tokens`, and its longest query."""
    manager.step = {str(place): number for place, number in enumerate(tokens)}
    found = manager.dispatch(len(tokens), sum(tokens), None, 0, None)
    return found.cg_mode.name, found.num_tokens, found.max_query_len


def captured_with(manager, support="ALWAYS", backend="FLASH_ATTN", additional="ALWAYS", **state):
    """`manager` after it has captured its graphs for such an attention; it keeps their descriptors alone."""
    builder = SimpleNamespace(get_cudagraph_support=lambda config, spec: AttentionCGSupport[support])
    group = SimpleNamespace(
        backend=type("Backend", (), {"get_name": staticmethod(lambda: backend)}),
        kv_cache_spec=None,
        get_metadata_builder=lambda place: builder,
    )
    own = {"supports_mm_inputs": False, "get_additional_cg_support": lambda: (AttentionCGSupport[additional], None)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelCudaGraphManager, "capture", lambda self, *arguments, **more: None)
        manager.capture(None, SimpleNamespace(**own | state), None, None, None, [[group]], None, has_lora=False)
    return manager


def test_a_verify_pass_is_timed_on_the_inputs_that_its_graph_was_captured_with(manager, monkeypatch):
    asked = []
    monkeypatch.setattr(graphs, "prepare_inputs_to_capture", lambda *given, **named: asked.append((given[:2], named)))
    drafting = captured_with(manager({"length_table": "4:2"}))
    every = [one for found in drafting._capture_descs.values() for one in found]
    drafting.graphs = {one: SimpleNamespace(replay=lambda one=one: one) for one in every}
    replays = drafting.decode_replays()
    assert set(replays) == {0, 2, 4} and 4 in replays[2]
    for width, by_requests in replays.items():
        for requests, replay in by_requests.items():
            captured = replay.launch()
            assert (captured.num_reqs, captured.num_tokens) == (requests, requests * (1 + width))
            replay.prepare()
            inputs = {"full_cudagraph": True, "max_query_len": 1 + width, "pcp_manager": None}
            assert asked.pop() == ((requests, requests * (1 + width)), inputs)


def test_there_is_a_full_graph_for_every_width_where_the_table_has_it_and_for_no_other(manager):
    drafting, plain = manager({"length_table": "4:2"}), manager(None)
    for requests in range(1, 9):
        for width in (4, 2, 0):
            mode, tokens, uniform = graph_of(drafting, requests, width)
            if width == 4 and requests >= 4:  # two places at most, there
                assert (mode, uniform) == ("FULL", None)
            else:
                assert (mode, uniform) == ("FULL", width + 1)
                assert tokens >= requests * (width + 1)
        assert graph_of(drafting, requests, 3)[::2] == ("FULL", None)
    for requests in (1, 3, 8):
        assert graph_of(drafting, requests, 0) == graph_of(plain, requests, 0)


def test_a_step_that_requests_join_replays_a_full_graph_one_for_short_queries_where_all_are_short(manager):
    drafting = captured_with(manager({"length_table": "4:2"}))
    assert joined(drafting, 5, 5, 16) == ("FULL", 32, 16)  # 64 rows are 16 tokens of four heads each
    assert joined(drafting, 5, 5, 17) == ("FULL", 32, None)
    assert joined(drafting, 12) == ("FULL", 16, None)  # no query of this graph is longer
    assert joined(drafting, 5, 40)[0] == "NONE"
    assert drafting.step is None  # the next step's is another one
    assert drafting.dispatch(3, 26, None, 0, None).max_query_len is None
    for requests in range(1, 9):
        assert graph_of(drafting, requests, 0)[2] == 1


@pytest.mark.parametrize(
    ("attention", "config"),
    [
        ({"support": "UNIFORM_BATCH"}, {}),
        ({"supports_mm_inputs": True}, {}),
        ({"additional": "NEVER"}, {}),
        ({}, {"kv_transfer_config": object()}),
        ({}, {"cache_config.kv_sharing_fast_prefill": True}),
        ({}, {"parallel_config.decode_context_parallel_size": 2}),
        ({}, {"parallel_config.prefill_context_parallel_size": 2}),
    ],
)
def test_steps_have_the_graphs_that_vllm_gives_them_where_not_any_mix_can_be_captured(manager, attention, config):
    drafting, plain = manager({"length_table": "4:2"}), manager(None)
    for path, value in config.items():
        part, _, name = path.rpartition(".")
        setattr(getattr(drafting.vllm_config, part) if part else drafting.vllm_config, name, value)
    captured_with(drafting, **attention)
    captured = [one._capture_descs[CUDAGraphMode.PIECEWISE] for one in (drafting, plain)]
    assert captured[0] == captured[1]
    for tokens in range(1, 41):
        assert drafting.dispatch(2, tokens, None, 0) == plain.dispatch(2, tokens, None, 0)
    assert {one.uniform_token_count for one in drafting._capture_descs[CUDAGraphMode.FULL]} == {5, 3, 1}


def test_graphs_for_short_queries_are_for_the_backend_that_has_small_tiles_and_for_queries_that_hold_drafts(manager):
    other = captured_with(manager({"length_table": "4:2"}), backend="TRITON_ATTN")
    assert joined(other, 5, 5, 16) == ("FULL", 32, None)
    long = captured_with(manager({"num_speculative_tokens": 16}))  # 64 rows are 16 tokens, one fewer than a verify pass
    assert joined(long, 5, 5, 16) == ("FULL", 32, None)


def test_a_user_who_wants_graphs_of_decode_steps_alone_gets_no_others(manager):
    drafting = captured_with(manager({}, CUDAGraphMode.FULL_DECODE_ONLY))
    assert joined(drafting, 5, 5, 16)[0] == "NONE"
    assert {one.uniform_token_count for one in drafting._capture_descs[CUDAGraphMode.FULL]} == {5, 1}


def test_sizes_that_the_user_chose_are_kept(manager):
    found = manager({}, sizes=(1, 8, 16))._capture_descs[CUDAGraphMode.FULL]
    decode = {one.num_tokens for one in found if one.uniform_token_count}
    assert decode == {1, 5, 8, 10}  # 16 is no number of whole requests of 5 tokens within 16
    assert {one.num_tokens for one in found if not one.uniform_token_count} == {1, 8, 16}


@pytest.mark.parametrize("limit", [1, 8, 100, 256, 1024])
@pytest.mark.parametrize(
    "spec", [{"num_speculative_tokens": 12}, {"num_speculative_tokens": 12, "free_drafts": 20}, {}]
)
def test_every_width_that_measured_times_may_choose_has_a_decode_graph(spec, limit):
    found = settings(gate="auto", **spec)
    assert widths(found)[0] == found.width and widths(found)[-1] == 0
    captured = {width: decode_sizes(found, width, limit) for width in widths(found)}
    assert max(size for sizes in captured.values() for size in sizes) == reach(found, limit)
    assert all(size <= LARGEST_VERIFY for width, sizes in captured.items() if width for size in sizes)
    free = StepTimes({width: {1: 1.0} for width in widths(found)}, {1: 0.0})
    for requests in range(1, min(limit, MOST) + 1):
        rule = LengthRule(free, widths(found), lambda: 0.0)  # the wider the better, and all are tried
        chosen = {rule.choose(requests).width for _ in range(60)}
        for width in chosen:
            assert any(size >= requests * (width + 1) for size in captured[width]), (requests, width)
            if width:
                assert batch_size(requests) * (width + 1) <= LARGEST_VERIFY


# ---- sizes -----------------------------------------------------------------------------------------------------------


def sizes_of(own, max_num_seqs, capture=None, drafts=True, **spec):
    """The capture sizes that a configuration ends with, where vLLM's own would be `own`."""

    def original(self):
        if self.compilation_config.cudagraph_capture_sizes is None:
            self.compilation_config.cudagraph_capture_sizes = own
            self.compilation_config.max_cudagraph_capture_size = own[-1] if own else 0

    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=capture, max_cudagraph_capture_size=None),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192),
        speculative_config=early_exit(**spec) if drafts else None,
        additional_config=None,
        use_v2_model_runner=True,
    )
    capture_every_width(original)(config)
    chosen = config.compilation_config
    assert chosen.max_cudagraph_capture_size in (None, chosen.cudagraph_capture_sizes[-1] if own else 0)
    return chosen.cudagraph_capture_sizes


def test_graphs_reach_as_far_as_256_requests_draft():
    own = [1, 2, 4, 512]
    assert sizes_of(own, 256, drafts=False) == own
    assert sizes_of(own, 100) == own  # five tokens each are 500
    wide = sizes_of(own, 256)
    assert wide[: len(own)] == own and wide[-1] == 256 * 5
    assert set(wide[len(own) :]) == {5 * count for count in range(104, 257, 8)}
    # A table says which of these sizes are captured, and does not change them; more requests have no more.
    assert sizes_of(own, 256, length_table="97:2 200:0") == wide == sizes_of(own, 1024)
    assert sizes_of([], 256) == []  # no graphs at all
    assert sizes_of([1, 512], 256, capture=[1, 8]) == [1, 8]  # the user's


def test_mixed_batches_are_padded_by_no_more_than_an_eighth():
    own = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), *range(520, 1281, 40)]
    chosen = mixed_sizes(own)
    assert set(chosen) < set(own) and len(chosen) < 45 and chosen[-1] == 1280
    for size in own:
        following = min(one for one in chosen if one >= size)
        assert 8 * following <= 9 * size or following == size
    assert mixed_sizes([]) == []


def test_the_most_requests_of_a_width():
    found = settings(length_table="9:2 33:0 33@1000:1")
    assert [most_requests(found, width, 64) for width in (4, 2, 1, 0)] == [8, 32, 64, 64]
    assert [most_requests(settings(length_table="1:2"), width, 64) for width in (4, 2, 0)] == [0, 64, 64]
    assert decode_sizes(found, 4, 64) == (5, 10, 20, 40) and decode_sizes(found, 2, 64)[-1] == 32 * 3
    assert decode_sizes(found, 0, 1024)[-1] == 512
    assert request_counts(3) == (1, 2, 3) and request_counts(8) == (1, 2, 4, 8)
    assert request_counts(300)[-4:] == (256, 272, 288, 300)


def test_the_widest_graph_is_captured_first_because_its_output_holds_all_others(manager):
    found = manager({})._capture_descs[CUDAGraphMode.FULL]
    assert [one.num_tokens for one in found] == sorted((one.num_tokens for one in found), reverse=True)
    assert {one.uniform_token_count for one in found} == {K + 1, 1, None}
    assert len(found) == len(set(found))


def test_engines_without_early_exit_are_left_alone(manager):
    for made in (manager(None), manager(None, varlen_decode=True)):
        candidates, captured = made._candidates, made._capture_descs
        made._candidates, made._capture_descs = {}, {}
        ModelCudaGraphManager._init_candidates(made)
        assert (candidates, captured) == (made._candidates, made._capture_descs)


def test_beyond_the_requests_of_one_kernel_few_numbers_of_draft_steps_have_a_graph():
    sizes = SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, *range(8, 512, 8)], max_cudagraph_capture_size=504)
    config = SimpleNamespace(compilation_config=sizes, scheduler_config=SimpleNamespace(max_num_seqs=140))
    chosen = graphs.draft_sizes(config, 64)
    assert chosen.cudagraph_capture_sizes == [1, 2, 4, *range(8, 72, 8), 96, 128, 136]
    assert chosen.max_cudagraph_capture_size == 504
    sizes.cudagraph_capture_sizes = None  # without graphs
    assert graphs.draft_sizes(config, 64).cudagraph_capture_sizes == []
