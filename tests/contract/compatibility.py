"""What shows each row of the tables of docs/limits.md: the page says what works, these name the test and the refusal.

A row is named by the beginning of its first cell. test_compatibility.py compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from selfspec_cli.early_exit.contexts import Context
from selfspec_cli.early_exit.draft_weights import WeightFacts, require_draft_weights
from selfspec_cli.vllm_plugin import refusals, spec_config

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
REFUSED, BY_VLLM = "Refused", "by vLLM"
RECORDS = (
    "gpu/lossless_h100.json",
    "gpu/lossless_h200.json",
    "gpu.jsonl.xz/lossless.json",
    "gpu.jsonl.xz/lossless_lengths.json",
    "gpu/lowbit.jsonl.xz/lossless_more_h200.json",
)
"""Of results/published: the cases of `tests/gpu/test_v2_lossless.py` on vLLM 0.32.0, with batch-invariant kernels."""


@dataclass(frozen=True)
class Row:
    """One line of the page's tables of three columns. table: the heading above it.

    Of what works, `shown` is where that was seen, such as "CPU, GPU (Gemma 3)", and note is what to know. Of what is
    refused, shown is empty, note is the reason, and instead what the refusal has to advise.
    """

    table: str
    what: str
    shown: str
    note: str
    instead: str = ""


def rows() -> list[Row]:
    """The rows of the page's tables of what is refused, and of what works and where that was shown."""
    found, table = [], ""
    for line in PAGE.read_text(encoding="utf-8").partition("<!-- compatibility -->")[2].splitlines():
        if line.startswith("#"):
            table = line.lstrip("# ")
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 3 or cells[0] == "refused":
            continue
        if table == REFUSED and not cells[0].startswith("-"):
            found.append(Row(table, cells[0], "", *cells[1:]))
        elif cells[1].startswith(("CPU", "GPU")):
            found.append(Row(table, *cells))
    return found


# ---- what triggers our refusals -------------------------------------------------------------------------------------

ONES = dict.fromkeys(refusals.ONE_ONLY, 1)
PLAIN = ONES | {
    "enable_elastic_ep": False,
    "watermark_config": None,
    "offload_group_size": 0,
    "offload_backend": "uva",
    "enable_lora": False,
}
"""Arguments of vLLM's EngineArgs that early exit looks at, as they are by default."""


def engine(**changes: Any) -> Callable[[], Any]:
    return lambda: refusals.refuse_engine(SimpleNamespace(**PLAIN | changes))


def blocks_of_latent_keys() -> None:
    from selfspec_cli.vllm_plugin.contexts.blocks import Blocks

    made, backend = Blocks(256), SimpleNamespace(get_name=lambda: "FLASHMLA")
    layer = SimpleNamespace(attn_backend=backend, kv_cache_dtype="auto")
    made.names = {"layer"}
    compilation = SimpleNamespace(static_forward_context={"layer": layer}, cudagraph_mode=None)
    made.vllm_config = SimpleNamespace(compilation_config=compilation)
    made.start()


def target(name: str, value: Any = True) -> Callable[[], Any]:
    facts = {"model": "m", "runner_type": "generate", **dict.fromkeys(refusals.NO_TARGETS, False), name: value}
    return lambda: refusals.refuse_model(SimpleNamespace(**facts))


def weights(kind: str, **facts: Any) -> Callable[[], Any]:
    return lambda: require_draft_weights(kind, WeightFacts(**facts))


def runner(device: str, v2: bool | None) -> Callable[[], Any]:
    return lambda: refusals.require_runner(device, v2, has_triton=False)


LATENTS = SimpleNamespace(model="m", use_mla=False, is_deepseek_mla=True)
WINDOWED = SimpleNamespace(kv_cache_spec=None, kv_cache_group_id=0)
ADAPTERS, EXPERTS = SimpleNamespace(enable_lora=True), SimpleNamespace(is_moe=True)
REFUSALS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("pipeline parallelism", engine(pipeline_parallel_size=2)),
    ("data parallelism", engine(data_parallel_size=2)),
    ("elastic expert parallelism", engine(enable_elastic_ep=True)),
    ("prefill or decode context parallelism", engine(prefill_context_parallel_size=2)),
    ("prefill or decode context parallelism", engine(decode_context_parallel_size=2)),
    ("latent attention (MLA) on a CPU", lambda: refusals.refuse_latents(LATENTS, "cpu")),
    ("recurrent states", target("is_hybrid")),
    ("recurrent states", target("is_attention_free")),
    ("encoder-decoder models", target("is_encoder_decoder")),
    ("diffusion language models", target("is_diffusion")),
    ("embedding and other pooling models", target("runner_type", "pooling")),
    ("LoRA with a mixture of experts", lambda: refusals.refuse_adapters(ADAPTERS, EXPERTS)),
    ("sessions whose input streams in", refusals.refuse_streamed_input),
    ("watermarks", engine(watermark_config={"key": 1})),
    ("V2 model runner on a CPU", runner("cpu", True)),
    ("V1 model runner on a GPU", runner("cuda", False)),
    ("devices other than", runner("xpu", None)),
    ("draft_window for layers", lambda: refusals.refuse_context(Context("window", (64,)), [WINDOWED])),
    ("draft_context=blocks:N for latent keys", blocks_of_latent_keys),
    ("weights fetched while layers run", engine(offload_group_size=4)),
    (
        "keys of a speculative_config",
        lambda: spec_config._refuse_keys({"method": "layer_skip", "prompt_lookup_max": 3}),
    ),
    ("copies fitted to data, with tensor", lambda: refusals.refuse_fitted_copies("a file", 2)),
    ("copies with expert parallelism", weights("fp8", is_moe=True, expert_parallel=True)),
    ("copies of quantised experts", weights("fp8", quantization="awq", is_moe=True)),
    ("integer copies where a rank's rows", weights("int8", row_lengths=(96,))),
    ("fp8 on an older GPU", weights("fp8", device="cuda", dtype="float16")),
)
"""The beginning of a row's name -> what is refused; a row may have several."""

# ---- what tries the others on the CPU -------------------------------------------------------------------------------

TESTS: dict[str, tuple[str, ...]] = {
    "test_two_ranks::two_ranks_draft_on_their_shares_of_weights_and_experts": (
        "tensor parallelism",
        "copies with tensor parallelism",
    ),
    "test_lossless::greedy": (
        "dense decoders",
        "mixture of experts",
        "sliding windows",
        "greedy decoding",
        "an engine on a CPU",
        "prefix caching, chunked prefill",
        "shared (the target's own)",
    ),
    "test_lossless::other_engine_settings": ("without chunked prefill",),
    "test_lossless::compiled": ("torch.compile, eager",),
    "test_lossless_edges::scenario": (
        "structured output",
        "stop tokens, min_tokens, end of text",
        "penalties, bad words",
        "requests up to max_model_len",
    ),
    "test_lossless_edges::logprobs_are_the_target_models": ("log-probabilities",),
    "test_architectures::one_of_each_family": ("vLLM's Transformers backend", "architectures with MTP layers"),
    "test_works_with::quantised_targets": ("quantised targets", "copies of quantised weights"),
    "test_works_with::multimodal_models": ("multimodal models",),
    "test_works_with::positions_of_several_dimensions": ("positions of several dimensions",),
    "test_works_with::prompts_given_as_embeddings": ("prompts given as embeddings",),
    "test_works_with::stop_strings_several_samples_and_seeds_of_prompts_in_pieces": ("stop strings",),
    "test_works_with::keys_and_values_that_another_engine_made": ("KV connectors",),
    "test_works_with::each_request_has_the_output_of_its_own_adapter": ("LoRA requests",),
    "test_sampling::drafting_keeps_the_distribution": ("sampling, seeds", "drafts drawn"),
    "test_request_faults::a_seed_gives_the_same_sample_again": ("a seed again",),
    "test_request_faults::each_field_beside_all_others": ("every other field of a request", "logit_bias, min_p"),
    "test_request_faults::thinking_ends_when_its_own_budget_does": ("thinking budgets",),
    "test_request_faults::what_is_refused_is_refused_alone": ("trace_decode_token_ids",),
    "test_request_faults::a_custom_logits_processor_acts_on_its_requests_and_the_others_draft": ("custom logits",),
    "test_draft_lengths::vllms_list_of_lengths_by_batch_size_is_followed": ("draft length by batch size",),
    "test_draft_lengths::load_context_and_requests_own_wishes_together_while_requests_are_preempted": (
        "draft length by load",
        "preemption under a small KV cache",
    ),
    "test_draft_lengths::with_a_table_gate_auto_copies_a_window_and_preemption": ("drafts from a request's own text",),
    "test_draft_lengths::alone_where_no_layer_drafts": ("none",),
    "test_new_weights::copies_follow_weights_that_are_replaced": ("weights replaced in a live engine",),
    "test_views::a_thinned_view_drafts_and_the_output_is_the_targets": ("layers left out",),
    "test_views::drafts_with_a_window_are_others_and_the_output_is_the_targets": ("drafts with a window",),
    "test_views::drafts_attend_to_the_blocks_with_the_greatest_attention_and_the_output_is_the_targets": (
        "drafts over the blocks",
    ),
    "test_draft_weights::copies_draft_and_however_wrong_they_are_the_output_is_the_targets": ("fp8", "int8, int4"),
    "test_draft_weights::experts_are_copied_and_however_wrong_they_are_the_output_is_the_targets": (
        "copies of experts",
    ),
    "test_fit_heads::fitted_copies_draft_better_and_the_output_is_the_targets": (
        "copies fitted to data (draft_weights_path)",
    ),
}
"""File::function of tests/engine, without "test_" and ".py" -> the rows of the page that it tries."""
