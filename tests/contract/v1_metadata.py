"""What the V1 runner's samplers of vLLM are given of requests."""

import torch

UNUSED = """top_p top_k max_num_logprobs prompt_token_ids frequency_penalties presence_penalties repetition_penalties
allowed_token_ids_mask"""


def metadata_of(**changes):
    """What vLLM's sampler is given of sampled requests without any parameter but a temperature."""
    from vllm.v1.sample.logits_processor.state import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

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
