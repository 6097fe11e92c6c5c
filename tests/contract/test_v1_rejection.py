"""Steps that vLLM's rejection sampler gets wrong, by its own modules on a few logits; starts no engine."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.contract

VOCAB = 64


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """vLLM's for CPUs, in place of Triton's, as a worker has them."""
    from vllm.platforms import current_platform

    from selfspec_cli.vllm_plugin.worker import register_kernels_once

    current_platform.import_kernels()
    register_kernels_once()
    current_platform.register_triton_kernel_overrides()


def told(**changes):
    """What vLLM's sampler is told of sampled requests without any parameter but a temperature."""
    from vllm.v1.sample.logits_processor.state import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    unused = ("top_p", "top_k", "max_num_logprobs", "prompt_token_ids", "frequency_penalties", "presence_penalties",
              "repetition_penalties", "allowed_token_ids_mask")  # fmt: skip
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
        **dict.fromkeys(unused),
    }
    return SamplingMetadata(**fields | changes)


def original(method):
    """vLLM's own function, also after another test has replaced it."""
    while getattr(method, "__closure__", None) and method.__module__.startswith("selfspec_cli"):
        method = next(cell.cell_contents for cell in method.__closure__ if callable(cell.cell_contents))
    return method


def step(drafts, logits, metadata, mended=True):
    """A step of two requests with these drafts, through the rejection sampler."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    from selfspec_cli.vllm_plugin.v1.sampling import without_drafts

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
    metadata = told(**{name: value for name, value in values.items() if top in (name, "both")})
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
    from selfspec_cli.vllm_plugin.v1.sampling import chosen_tokens_beside_others

    rows = sum(map(len, drafts)) + 2
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1))
    metadata = told(logprob_token_ids={0: [9, 11]}, max_num_logprobs=likeliest, all_greedy=True, all_random=False,
                    temperature=None, spec_token_ids=drafts)  # fmt: skip
    from vllm.v1.sample.sampler import Sampler

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
    from selfspec_cli.vllm_plugin.v1.sampling import draw

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
    from scipy import stats

    from selfspec_cli.vllm_plugin.v1.sampling import draw

    torch.manual_seed(0)
    count = 40_000
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).expand(count, -1)
    tokens, probs = draw(logits, torch.full((count,), 1.5), {7: torch.Generator().manual_seed(1)})
    assert probs[0].tolist() == pytest.approx((logits[0] / 1.5).softmax(-1).tolist())
    seen = torch.bincount(tokens, minlength=4)
    assert seen[3] == 0
    assert stats.chisquare(seen[:3].double(), probs[0, :3].double() / probs[0, :3].double().sum() * count).pvalue > 1e-3


def test_custom_logits_processors_are_refused_by_vllm():
    """When an engine starts, under any speculative method."""
    from types import SimpleNamespace

    from vllm.v1.sample.logits_processor import build_logitsprocs

    config = SimpleNamespace(speculative_config=object())
    with pytest.raises(ValueError, match="Custom logits processors are not supported when speculative decoding is"):
        build_logitsprocs(config, torch.device("cpu"), False, False, ["a.module:Processor"])
