"""Steps that vLLM's samplers get wrong together with drafts, by its own modules on a few logits; starts no engine."""

import random
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from v2_engine import early_exit
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.sample import thinking_budget_state
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, build_logitsprocs
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor.state import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler, apply_sampling_constraints
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from selfspec_cli.vllm_plugin.v1.sampling import (
    Budgets,
    _with_drafts_counted,
    bonus_token_after_drafts,
    build_all,
    chosen_tokens_beside_others,
    constrain_drafts,
    draw,
    not_to_draft,
    without_drafts,
)
from selfspec_cli.vllm_plugin.worker import register_kernels_once

VOCAB = 64
UNUSED = """top_p top_k max_num_logprobs prompt_token_ids frequency_penalties presence_penalties repetition_penalties
allowed_token_ids_mask"""
GREEDY = {"all_greedy": True, "all_random": False, "temperature": None}


def metadata_of(**changes):
    """What vLLM's sampler is given of sampled requests without any parameter but a temperature."""
    fields = {
        "temperature": torch.tensor([0.8, 0.8]),
        "all_greedy": False,
        "all_random": True,
        "no_penalties": True,
        "generators": {},
        "bad_words_token_ids": {},
        "output_token_ids": [[7], [7]],
        "spec_token_ids": [[], []],
        "logitsprocs": LogitsProcessors(),
        **dict.fromkeys(UNUSED.split()),
    }
    return SamplingMetadata(**fields | changes)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """vLLM's for CPUs, in place of Triton's, as a worker has them."""
    current_platform.import_kernels()
    register_kernels_once()
    current_platform.register_triton_kernel_overrides()


def original(method):
    """vLLM's own function, also after another test has replaced it."""
    while getattr(method, "__closure__", None) and method.__module__.startswith("selfspec_cli"):
        method = next(cell.cell_contents for cell in method.__closure__ if callable(cell.cell_contents))
    return method


def step(drafts, logits, metadata, mended=True):
    """A step of two requests with these drafts, through the rejection sampler."""
    forward = original(RejectionSampler.forward)
    chosen = without_drafts(forward) if mended else forward
    spec = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    ends = torch.tensor([len(one) + 1 for one in drafts]).cumsum(0)
    spec.bonus_logits_indices = ends - 1
    spec.target_logits_indices = torch.tensor([i for i in range(int(ends[-1])) if i not in (ends - 1).tolist()]).long()
    return chosen(RejectionSampler(Sampler()), spec, None, logits.clone(), metadata)


@pytest.mark.parametrize("top", ["top_k", "top_p", "both", "none"])
def test_a_step_without_drafts_is_sampled_as_without_speculation(top):
    values = {"top_k": torch.tensor([1, 1], dtype=torch.int32), "top_p": torch.tensor([1e-6, 1e-6])}
    metadata = metadata_of(**{name: value for name, value in values.items() if top in (name, "both")})
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    sampled = step([[], []], logits, metadata).sampled_token_ids
    assert sampled.shape == (2, 1)
    if top != "none":
        assert sampled.flatten().tolist() == logits.argmax(-1).tolist()
    if top == "top_k":
        with pytest.raises((RuntimeError, IndexError), match="max"):
            step([[], []], logits, metadata, mended=False)  # the fault


@pytest.mark.parametrize("drafts", [[[], []], [[3, 4], [5]], [[], [5, 6]]], ids=str)
@pytest.mark.parametrize("likeliest", [None, 2])
def test_chosen_tokens_have_their_log_probabilities_beside_requests_with_the_likeliest(drafts, likeliest):
    """Of request 0 two tokens are asked for; request 1 asks for the likeliest, or for none."""
    rows = sum(map(len, drafts)) + 2
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1))
    metadata = metadata_of(logprob_token_ids={0: [9, 11]}, max_num_logprobs=likeliest, spec_token_ids=drafts, **GREEDY)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Sampler, "forward", chosen_tokens_beside_others(original(Sampler.forward)))
        output = step(drafts, logits, metadata)
    found, wide = output.logprobs_tensors, max(map(len, drafts)) + 1
    want = logits.log_softmax(-1)
    assert found.logprobs.shape == (2 * wide, 3)
    first = found.logprob_token_ids[0].tolist()
    assert first[1:] == [9, 11]
    assert found.logprobs[0].tolist() == pytest.approx(want[0, first].tolist())
    second, row = found.logprob_token_ids[wide].tolist(), len(drafts[0]) + 1
    asked = 1 + (likeliest or 0)
    assert found.logprobs[wide, :asked].tolist() == pytest.approx(want[row, second[:asked]].tolist())
    if likeliest:
        assert second[1:] == want[row].topk(2).indices.tolist()


def test_a_draft_is_drawn_from_its_requests_own_generator():
    logits, temperature = torch.randn(3, VOCAB), torch.tensor([0.7, 0.0, 1.0])

    def drawn():
        own = {0: torch.Generator().manual_seed(5)}
        return [draw(logits, temperature, own)[0].tolist() for _ in range(20)]

    first, again = drawn(), drawn()
    assert [one[0] for one in first] == [one[0] for one in again]
    assert {one[1] for one in first} == {int(logits[1].argmax())}
    assert [one[2] for one in first] != [one[2] for one in again]


def test_drafts_have_the_distribution_that_is_verified():
    """Chi-square of 40,000 draws against the returned probabilities."""
    torch.manual_seed(0)
    count = 40_000
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).expand(count, -1)
    tokens, probs = draw(logits, torch.full((count,), 1.5), {7: torch.Generator().manual_seed(1)})
    assert probs[0].tolist() == pytest.approx((logits[0] / 1.5).softmax(-1).tolist())
    seen = torch.bincount(tokens, minlength=4)
    assert seen[3] == 0
    assert stats.chisquare(seen[:3].double(), probs[0, :3].double() / probs[0, :3].double().sum() * count).pvalue > 1e-3


def update(added=(), moved=(), batch_size=4):
    return BatchUpdate(batch_size=batch_size, removed=[], added=list(added), moved=list(moved))


def not_drafted(params, *custom):
    """Rows of a batch of requests with these parameters that draft nothing, in an engine with these custom processors
    as well as vLLM's."""
    config = SimpleNamespace(
        speculative_config=early_exit(), scheduler_config=SimpleNamespace(max_num_seqs=len(params))
    )
    given = (config, torch.device("cpu"), False, False, custom)
    if custom:
        with pytest.raises(ValueError, match="Custom logits processors are not supported when speculative decoding is"):
            build_logitsprocs(*given)
    processors = build_all(build_logitsprocs)(*given)
    added = [(row, each, [], [7]) for row, each in enumerate(params)]
    for one in processors.all:
        one.update_state(update(added, batch_size=len(params)))
    requests = {f"r{row}": SimpleNamespace(sampling_params=each) for row, each in enumerate(params)}
    return not_to_draft(SimpleNamespace(logitsprocs=processors, req_ids=[*requests], num_reqs=len(params)), requests)


def test_drafts_are_verified_with_their_requests_temperature_and_top_k():
    """The rows of the drafts of two requests, beside what each row alone is sampled from without drafts."""
    logits, temperature, top_k = torch.randn(5, VOCAB), torch.tensor([0.7, 1.3]), torch.tensor([3, 5])
    metadata = metadata_of(temperature=temperature, top_k=top_k)
    found = constrain_drafts(original(apply_sampling_constraints))(logits.clone(), torch.tensor([2, 5]), metadata)
    for row, request in enumerate((0, 0, 1, 1, 1)):
        kept = logits[row].topk(int(top_k[request])).indices
        assert set(found[row].isfinite().nonzero()[:, 0].tolist()) == set(kept.tolist())
        assert found[row, kept].tolist() == pytest.approx((logits[row, kept] / temperature[request]).tolist())


def test_requests_that_a_processor_of_one_row_acts_on_are_not_drafted_for():
    asked = [
        SamplingParams(min_p=0.1),
        SamplingParams(min_p=0.1, temperature=0.0),
        SamplingParams(logit_bias={3: 1.0}, temperature=0.0),
        SamplingParams(thinking_token_budget=4),
        SamplingParams(min_tokens=4),
    ]
    assert not_drafted(asked) == {0, 2, 3}


def test_only_requests_without_a_custom_processor_are_drafted_for():
    class OfSome(AdapterLogitsProcessor):
        def is_argmax_invariant(self):
            return False

        def new_req_logits_processor(self, params):
            return (lambda written, logits: logits) if params.extra_args else None

    class OfAll(MinTokensLogitsProcessor):
        """No adapter, so that nobody knows which requests it acts on."""

    params = [SamplingParams(), SamplingParams(extra_args={"avoid": 1}), SamplingParams()]
    assert not_drafted(params) == set()
    assert not_drafted(params, OfSome) == {1}
    assert not_drafted(params, OfSome, OfAll) == {0, 1, 2}


# ---- Which stop tokens vLLM's own processor of min_tokens forbids for the token after a round


STOPS = {0: {1}, 1: {2, 3}, 3: {4}}
"""Stop tokens of the requests in rows 0, 1 and 3; the one in row 2 has no min_tokens."""


def with_min_tokens(drafts, written=(5, 2, 9, 3)):
    """What vLLM's sampler gets for four requests with min_tokens of 6. written: tokens that each has."""
    processor = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
    asked = {"min_tokens": 6, "structured_outputs": None}
    rows = {row: SimpleNamespace(all_stop_token_ids=stops, **asked) for row, stops in STOPS.items()}
    processor.update_state(update([(row, one, [], [7] * written[row]) for row, one in rows.items()]))
    return processor, metadata_of(
        output_token_ids=[[7] * count for count in written],
        spec_token_ids=drafts,
        logitsprocs=LogitsProcessors([processor]),
        **GREEDY,
    )


def forbidden(function, given, bonus=True):
    """(row, token) pairs that `function`, an `apply_logits_processors`, forbids."""
    logits = function(Sampler(), torch.zeros(4, 8), given, bonus)
    return {(row, token) for row, token in logits.isneginf().nonzero().tolist()}


ALL = {(row, token) for row, stops in STOPS.items() for token in stops}


@pytest.mark.parametrize(
    ("drafts", "want"),
    [
        ([[], [], [], []], ALL),
        ([[5], [5], [], []], ALL - {(0, 1)}),  # 5 + 1 tokens reach 6, 2 + 1 do not
        ([[], [5] * 4, [5] * 4, [5] * 2], ALL - {(1, 2), (1, 3)}),  # 2 + 4 reach it, 3 + 2 do not
        ([[-1], [-1] * 4, [], [-1] * 3], set()),  # -1: drafted, and not yet known to the host
    ],
)
def test_a_stop_token_is_forbidden_while_the_drafts_before_it_are_too_few(drafts, want):
    processor, given = with_min_tokens(drafts)
    theirs = original(Sampler.apply_logits_processors)
    ours = bonus_token_after_drafts(theirs)
    assert forbidden(ours, given) == want
    assert forbidden(ours, given, bonus=False) == ALL  # a request without drafts: its next token is no bonus
    assert forbidden(theirs, given) == ALL  # the fault, and that ours has changed nothing of vLLM's
    assert set(processor.min_toks) == set(STOPS)
    assert given.logitsprocs.non_argmax_invariant == [processor]


def test_without_min_tokens_nothing_is_copied():
    _, given = with_min_tokens([[5]] * 4, written=(6, 7, 8, 9))
    assert _with_drafts_counted(given) is given
    _, given = with_min_tokens(None)
    assert _with_drafts_counted(given) is given


# ---- thinking budgets beside requests with drafts, against vLLM's own states of a plain engine; starts no engine -----


SMALL, THINKS, ENDS = 8, [6], [7, 5]
LENGTH = 40


def holders(ends=ENDS):
    """(ours, vLLM's own of a plain engine) for four requests."""
    config = SimpleNamespace(reasoning_start_token_ids=THINKS, reasoning_end_token_ids=ends)

    def theirs(requests=1):
        return thinking_budget_state.ThinkingBudgetStateHolder(config, requests, 0, torch.device("cpu"), False)

    return Budgets(theirs), theirs(4)


def request(budget):
    return SimpleNamespace(thinking_token_budget=budget)


def forced(logits):
    """Row -> the token that is forced there."""
    return dict(logits.gt(1e8).nonzero().tolist())


def plain(prompt, budget, draw, ends=ENDS):
    """A text of LENGTH tokens by vLLM's own states, a token a step, and what they force at each place; None where they
    force nothing, and the token is random."""
    _, theirs = holders(ends)
    written: list[int] = []
    must: list[int | None] = []
    theirs.sync_batch(update([(0, request(budget), prompt, written)]))
    for _ in range(LENGTH):
        theirs.update_state([written], [[]])
        must.append(forced(theirs.apply_to_logits(torch.zeros(1, SMALL), False, [[]])).get(0))
        written.append(draw.choice([0, 1, 2, 3, *THINKS, *ends]) if must[-1] is None else must[-1])
    return written, must


@pytest.mark.parametrize("ends", [ENDS, [7]], ids=["two tokens", "one token"])
@pytest.mark.parametrize("seed", range(12))
def test_each_token_is_forced_as_plain_decoding_forces_it(seed, ends):
    """Row 0 has no budget, and in some steps it has drafts; requests in rows 1 and 2 have budgets."""
    draw = random.Random(seed)
    prompts = [[1, *THINKS] if draw.random() < 0.6 else [1, 2], [2, *THINKS, 3]]
    budgets = [draw.randrange(10), draw.randrange(10)]
    requests = zip(prompts, budgets, strict=True)
    texts, must = zip(*(plain(prompt, budget, draw, ends) for prompt, budget in requests), strict=True)
    ours, _ = holders(ends)
    ours.sync_batch(update([(1 + row, request(budgets[row]), prompts[row], []) for row in range(2)]))
    for at in range(LENGTH):
        drafts = [[4] * draw.randrange(3), [], []]
        ours.update_state([[0] * at, *(text[:at] for text in texts)], drafts)
        rows = ours.apply_to_logits(torch.zeros(3, SMALL), any(drafts), drafts)
        assert forced(rows) == {1 + row: tokens[at] for row, tokens in enumerate(must) if tokens[at] is not None}
        if drafts[0]:
            assert not forced(ours.apply_to_logits(torch.zeros(len(drafts[0]), SMALL), False, drafts))


def test_a_request_that_moves_into_the_row_of_another_does_not_get_its_budget():
    ours, theirs = holders([7])
    for holder in (ours, theirs):
        written = [[0] for _ in range(3)]
        asked = [(row, request(budget), [1, *THINKS], written[row]) for row, budget in enumerate((0, 9, None))]
        holder.sync_batch(update(asked))
        # Request 0 has ended, and 2 takes its row; vLLM does not list a row as removed that is filled at once.
        holder.sync_batch(update(moved=[(2, 0, MoveDirectionality.UNIDIRECTIONAL)]))
        assert set(holder.followed if holder is ours else holder._state) == ({1} if holder is ours else {0, 1})
    followed = ours.followed[1]
    ours.sync_batch(update(moved=[(0, 1, MoveDirectionality.SWAP)]))
    assert ours.followed == {0: followed}


def test_a_request_that_comes_back_goes_on_where_it_was():
    """After a preemption it is added with all tokens that it has."""
    text, must = plain([1, *THINKS], 6, random.Random(3), [7])
    for at in range(1, LENGTH):
        ours, _ = holders([7])
        ours.sync_batch(update([(0, request(6), [1, *THINKS], text[:at])]))
        ours.update_state([text[:at]], [[]])
        assert forced(ours.apply_to_logits(torch.zeros(1, SMALL), False, [[]])).get(0) == must[at]
