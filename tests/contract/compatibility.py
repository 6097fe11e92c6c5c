"""What early exit works with, as data: docs/limits.md is made of it, and test_compatibility.py checks each row.

A row that works names the test that tries it on the CPU, in an engine of real vLLM. A row that is refused names what
triggers the refusal, and words of the message that say what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import architecture_table
import field_table

from selfspec_cli.early_exit.contexts import Context
from selfspec_cli.early_exit.draft_weights import WeightFacts, require_draft_weights
from selfspec_cli.vllm_plugin import refusals, spec_config

YES, REFUSED, BY_VLLM = "yes", "refused", "refused by vLLM"
UNTRIED = "not tried"
CASES = "tried"
"""0.32.0, batch-invariant kernels: `tests/gpu/test_v2_lossless.py`, and its records in `RECORDS`."""
RECORDS = (
    "gpu/lossless_h100.json",
    "gpu/lossless_h200.json",
    "gpu.jsonl.xz/lossless.json",
    "gpu.jsonl.xz/lossless_lengths.json",
    "gpu/lowbit.jsonl.xz/lossless_more_h200.json",
)
"""Of results/published."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    what: the feature. works: YES, REFUSED or BY_VLLM. note: how it works, or why not. cpu: the test that shows
    it, as "file::function" below tests/. on_cpu: what the table says of the CPU, if it is not that this test passes.
    gpu: what was seen on a GPU. refusal: raises the error of a row that we refuse; instead: words of its message.
    """

    what: str
    works: str
    note: str
    cpu: str | None = None
    gpu: str = UNTRIED
    refusal: Callable[[], Any] | None = None
    instead: str = ""
    on_cpu: str = ""


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


def latents_on_a_cpu() -> Any:
    refusals.refuse_latents(SimpleNamespace(model="m", use_mla=False, is_deepseek_mla=True), "cpu")


def adapters_of_experts() -> Any:
    refusals.refuse_adapters(SimpleNamespace(enable_lora=True), SimpleNamespace(is_moe=True))


def weights(kind: str, **facts: Any) -> Callable[[], Any]:
    return lambda: require_draft_weights(kind, WeightFacts(**facts))


def unused_key() -> Any:
    spec_config._refuse_keys({"method": "layer_skip", "prompt_lookup_max": 3})


def runner(device: str, v2: bool | None) -> Callable[[], Any]:
    return lambda: refusals.require_runner(device, v2, has_triton=False)


# ---- the table ------------------------------------------------------------------------------------------------------

LOSSLESS, EDGES = "engine/test_lossless.py::test_greedy", "engine/test_lossless_edges.py::test_scenario"
WORKS_WITH, TWO = "engine/test_works_with.py::", "engine/test_two_ranks.py::"
COPIES = "engine/test_draft_weights.py::"
ARCHITECTURES = "engine/test_architectures.py::test_one_of_each_family"
FAULTS = "engine/test_request_faults.py::"
ONE_SERVER = "start one server for each GPU"

ROWS: dict[str, tuple[Row, ...]] = {
    "Several GPUs": (
        Row(
            "tensor parallelism",
            YES,
            "layers, exit head and copies of weights are split as vLLM splits them; gates "
            "end the draft loop of all ranks after the same step where the GPUs reach each other's memory, as over "
            "NVLink",
            TWO + "test_two_ranks_draft_on_their_shares_of_weights_and_experts",
            f"{CASES} (two H200, two H100; gates, lengths by acceptance, 4- and 8-bit copies, experts)",
        ),
        Row("expert parallelism", YES, "on shared weights; copies are refused", None, f"{CASES} (two H200; Qwen3-MoE)"),
        Row(
            "pipeline parallelism",
            REFUSED,
            "draft and target share every layer, so all layers must be on one worker",
            refusal=engine(pipeline_parallel_size=2),
            instead="tensor_parallel_size splits the model over GPUs",
        ),
        Row(
            "data parallelism",
            REFUSED,
            "ranks would draft different numbers of steps and wait for each other",
            refusal=engine(data_parallel_size=2),
            instead=ONE_SERVER,
        ),
        Row(
            "prefill context parallelism",
            REFUSED,
            "a draft step's attention is not split over ranks",
            refusal=engine(prefill_context_parallel_size=2),
            instead="use tensor_parallel_size",
        ),
        Row(
            "decode context parallelism",
            REFUSED,
            "a draft step's attention is not split over ranks",
            refusal=engine(decode_context_parallel_size=2),
            instead="use tensor_parallel_size",
        ),
    ),
    "Models": (
        Row(
            "dense decoders (Llama, Qwen3, Gemma, ...)",
            YES,
            "whatever the architecture is called: its decoder is the "
            "part whose forward loops over its layers; the table below has each that was tried",
            LOSSLESS,
            CASES,
        ),
        Row("mixture of experts", YES, "Qwen3-MoE on the CPU; also Mixtral and Llama 4 on a GPU", LOSSLESS, CASES),
        Row(
            "sliding windows",
            YES,
            "Mistral, Gemma 2 and Gemma 3; on a GPU Mistral was tried without its window, with "
            "which FlashAttention 3 is not batch-invariant for vLLM's own methods either",
            LOSSLESS,
            f"{CASES} (Gemma 3)",
        ),
        Row("latent attention (MLA)", YES, "DeepSeek-V2", None, f"{CASES} (DeepSeek-V2)", on_cpu="refused, next row"),
        Row(
            "latent attention on a CPU",
            REFUSED,
            "in vLLM 0.32.0 a verify pass is not right there: its own n-gram drafts change greedy output too",
            refusal=latents_on_a_cpu,
            instead="without a speculative_config",
        ),
        Row(
            "quantised targets",
            YES,
            "the draft runs on the target's own quantised weights. On a CPU: "
            "compressed-tensors W4A16 and W8A8, GPTQ (also in bfloat16) and AWQ, in float16 and with AVX-512, because "
            "vLLM's product with 4-bit weights needs 16 bits and that; W8A8 in bfloat16 on processors with AMX, where "
            "float16 ends vLLM's process. On a GPU in batch-invariant mode vLLM multiplies AWQ's weights in float16 "
            "alone",
            WORKS_WITH + "test_quantised_targets",
            f"{CASES} (W4A16, GPTQ, fp8, AWQ in float16)",
        ),
        Row(
            "multimodal models",
            YES,
            "drafts are made of text; a picture is in the keys and values already. On a CPU: "
            "Idefics3; vLLM imports torchvision for LLaVA, Gemma 3 and others, which the install for CPUs leaves out",
            WORKS_WITH + "test_multimodal_models",
            f"{CASES} (Qwen2-VL, Idefics3)",
        ),
        Row(
            "vLLM's Transformers backend (StarCoder2, OLMo, Phi, SmolLM3, ..., or model_impl=transformers)",
            YES,
            "the layers are those of the model of Hugging Face's; dense and mixtures of experts",
            ARCHITECTURES,
            f"{CASES} (Llama; of StarCoder2 1 of 64 outputs differed)",
        ),
        Row(
            "architectures with MTP layers of their own (MiMo, DeepSeek-V3, ...)",
            YES,
            "drafts are made with their decoder's layers, not with the MTP layers",
            ARCHITECTURES,
        ),
        Row(
            "positions of several dimensions (M-RoPE: Qwen2-VL, ...)",
            YES,
            "a generated token has one position in all "
            "dimensions, behind pictures too: Qwen2-VL, Qwen2.5-VL, Qwen3-VL; on a GPU Qwen2-VL",
            WORKS_WITH + "test_positions_of_several_dimensions",
            CASES,
        ),
        Row(
            "recurrent states (Mamba, hybrids)",
            REFUSED,
            "rejected drafts would stay in the state",
            refusal=target("is_hybrid"),
            instead="without a speculative_config, or with vLLM's method 'ngram'",
        ),
        Row(
            "models that only have a recurrent state",
            REFUSED,
            "rejected drafts would stay in the state",
            refusal=target("is_attention_free"),
            instead="without a speculative_config, or with vLLM's method 'ngram'",
        ),
        Row(
            "encoder-decoder models (Whisper, ...)",
            REFUSED,
            "a draft step has no encoder's states",
            refusal=target("is_encoder_decoder"),
            instead="without a speculative_config",
        ),
        Row(
            "diffusion language models",
            REFUSED,
            "they make several tokens at once",
            refusal=target("is_diffusion"),
            instead="without a speculative_config",
        ),
        Row(
            "embedding and other pooling models",
            REFUSED,
            "they generate no tokens",
            refusal=target("runner_type", "pooling"),
            instead="leave the speculative_config out",
        ),
    ),
    "Adapters": (
        Row(
            "LoRA requests",
            YES,
            "drafts are made without the adapter, and verified with it: the output is the "
            "adapted model's own; the further the adapter moves the model, the fewer drafts are accepted. On the CPU "
            "vLLM itself gives requests without an adapter, beside others, what its last slot holds: set max_loras to "
            "one more than the adapters in use",
            "engine/test_adapters.py::test_each_request_has_the_output_of_its_own_adapter",
            CASES,
        ),
        Row(
            "LoRA with a mixture of experts",
            REFUSED,
            "vLLM applies such adapters inside the experts' kernels",
            refusal=adapters_of_experts,
            instead="with the adapter merged into the model's weights",
        ),
    ),
    "Requests": (
        Row("greedy decoding", YES, "the baseline's tokens; on a GPU in vLLM's batch-invariant mode", LOSSLESS, CASES),
        Row(
            "sampling, seeds",
            YES,
            "the baseline's distribution; a seed gives the same sample again, and another one than without drafts",
            "engine/test_sampling.py::test_drafting_keeps_the_distribution",
            CASES,
        ),
        Row(
            "a seed again, with draft lengths that change",
            YES,
            "a seed may give another sample where the load, "
            "other requests or measured times change the draft length: with a length_table, and with gate auto, which "
            "is the default",
            FAULTS + "test_a_seed_gives_the_same_sample_again",
        ),
        Row(
            "drafts drawn at the request's temperature",
            YES,
            "`draft_sample_method: probabilistic`; from the request's own seed where it has one",
            "engine/test_sampling.py::test_drafting_keeps_the_distribution",
            CASES,
        ),
        Row(
            "every other field of a request, alone and beside others",
            YES,
            "in steps with drafts and without, among "
            "them top_k alone and logprob_token_ids, with which vLLM's own speculation ends the engine of a CPU; on V2 "
            "vLLM's own speculation leaves out logprob_token_ids in steps with drafts",
            FAULTS + "test_each_field_beside_all_others",
        ),
        Row(
            "log-probabilities, of the prompt too",
            YES,
            "the target model's",
            "engine/test_lossless_edges.py::test_logprobs_are_the_target_models",
            CASES,
        ),
        Row("structured output", YES, "JSON schemas, choices and regular expressions", EDGES, CASES),
        Row(
            "stop tokens, min_tokens, end of text",
            YES,
            "a stop inside an accepted draft cuts what follows it",
            EDGES,
            CASES,
        ),
        Row(
            "stop strings, several samples (n), seeds of prompts in pieces",
            YES,
            "",
            WORKS_WITH + "test_stop_strings_several_samples_and_seeds_of_prompts_in_pieces",
        ),
        Row("penalties, bad words, allowed_token_ids", YES, "", EDGES, CASES),
        Row(
            "logit_bias, min_p",
            YES,
            "also where they come from a model's generation_config.json; vLLM refuses both "
            "under any other speculative method",
            FAULTS + "test_each_field_beside_all_others",
        ),
        Row(
            "thinking budgets (thinking_token_budget)",
            YES,
            "with a reasoning parser; also of several requests of one "
            "batch, and where thinking ends by itself inside drafts",
            FAULTS + "test_thinking_ends_when_its_own_budget_does",
        ),
        Row(
            "trace_decode_token_ids",
            BY_VLLM,
            "under any speculative method",
            FAULTS + "test_what_is_refused_is_refused_alone",
        ),
        Row(
            "custom logits processors (logits_processors)",
            YES,
            "on V1 a request that an AdapterLogitsProcessor acts "
            "on is not drafted for, and none is beside a processor of whole batches; on V2 all are",
            FAULTS + "test_a_custom_logits_processor_acts_on_its_requests_and_the_others_draft",
        ),
        Row(
            "sessions whose input streams in (StreamingInput)",
            REFUSED,
            "what a turn leaves in the context would depend on its drafts",
            refusal=refusals.refuse_streamed_input,
            instead="send each turn as a request of its own",
        ),
        Row(
            "watermarks",
            REFUSED,
            "drafts would be drawn without the watermark",
            refusal=engine(watermark_config={"key": 1}),
            instead="serve watermarked text without a speculative_config",
        ),
    ),
    "The engine": (
        Row("CPU", YES, "V1 model runner; vLLM's own sampling beside speculation is mended there", LOSSLESS, "-"),
        Row(
            "V2 model runner on a CPU",
            REFUSED,
            "vLLM's needs a Triton backend for CPUs; tests run it in Triton's interpreter (`engine=cpu runner=v2`)",
            refusal=runner("cpu", True),
            instead="unset VLLM_USE_V2_MODEL_RUNNER=1",
            gpu="-",
        ),
        Row(
            "V1 model runner on a GPU",
            REFUSED,
            "early exit on CUDA is written for V2",
            refusal=runner("cuda", False),
            instead="unset VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        Row(
            "devices that are for vLLM neither a CPU nor CUDA, such as XPUs",
            REFUSED,
            "vLLM has workers and model runners of their own for them",
            refusal=runner("xpu", None),
            instead="serve without a speculative_config",
        ),
        Row(
            "elastic expert parallelism (enable_elastic_ep)",
            REFUSED,
            "it adds data-parallel ranks to a live engine",
            refusal=engine(enable_elastic_ep=True),
            instead="allowed: False",
        ),
        Row("prefix caching, chunked prefill", YES, "", LOSSLESS, CASES),
        Row(
            "without chunked prefill, other block sizes", YES, "", "engine/test_lossless.py::test_other_engine_settings"
        ),
        Row(
            "preemption under a small KV cache",
            YES,
            "",
            "engine/test_lossless_edges.py::test_preemption_under_a_small_cache",
            CASES,
        ),
        Row("requests up to max_model_len", YES, "such requests draft less", EDGES, CASES),
        Row("torch.compile, eager", YES, "", "engine/test_lossless.py::test_compiled", CASES),
        Row("CUDA graphs, async scheduling", YES, "", None, CASES),
        Row(
            "draft length by batch size",
            YES,
            "`num_speculative_tokens_per_batch_size`",
            "engine/test_draft_lengths.py::test_vllms_list_of_lengths_by_batch_size_is_followed",
        ),
        Row(
            "draft length by load, by context and by request",
            YES,
            "",
            "engine/test_draft_lengths.py::"
            "test_load_context_and_requests_own_wishes_together_while_requests_are_preempted",
            CASES,
        ),
        Row(
            "drafts from a request's own text (free_drafts)",
            YES,
            "before the model's own drafts, on both runners; greedy and sampled, with every gate",
            "engine/test_free_drafts.py::test_with_a_table_gate_auto_copies_a_window_and_preemption",
            CASES,
        ),
        Row(
            "weights replaced in a live engine (reload_weights, weight transfer)",
            YES,
            "copies and a draft "
            "vocabulary's rows are made anew by the same call; after a load past vLLM's calls, before the next drafts. "
            "What was fitted to the old weights (an exit head, copies fitted to data) cannot be, and the log says so",
            "engine/test_new_weights.py::test_copies_follow_weights_that_are_replaced",
            CASES,
        ),
        Row(
            "an engine that sleeps (level 2), wakes and loads its weights again",
            YES,
            "copies are made anew with the weights",
            None,
            CASES,
            on_cpu="vLLM refuses it",
        ),
        Row(
            "KV connectors (prefill and decoding on different servers)",
            YES,
            "drafts write into the target's KV cache "
            "and add no layer to it: both sides lay it out alike, and only the one that decodes needs early exit",
            WORKS_WITH + "test_keys_and_values_that_another_engine_made",
            "tried (NIXL between two H200)",
        ),
        Row(
            "layers left out (skip_layers)",
            YES,
            "may change on a live engine that runs eagerly",
            "engine/test_views.py::test_a_thinned_view_drafts_and_the_output_is_the_targets",
            CASES,
        ),
        Row(
            "drafts with a window of the context (draft_window)",
            YES,
            "",
            "engine/test_views.py::test_drafts_with_a_window_are_others_and_the_output_is_the_targets",
            CASES,
        ),
        Row(
            "the same for layers with a sliding window of their own",
            REFUSED,
            "they count positions in the context",
            refusal=lambda: refusals.refuse_context(
                Context("window", (64,)), [SimpleNamespace(kv_cache_spec=None, kv_cache_group_id=0)]
            ),
            instead="leave draft_window out",
        ),
        Row(
            "drafts over the blocks with the greatest attention (draft_context=blocks:N)",
            YES,
            "chosen anew before each round; an engine with CUDA graphs is started with it",
            "engine/test_views.py::"
            "test_drafts_attend_to_the_blocks_with_the_greatest_attention_and_the_output_is_the_targets",
            CASES,
        ),
        Row(
            "the same for latent keys (MLA), for keys in fp8, and by other backends than FlashAttention",
            REFUSED,
            "their keys cannot be read",
            refusal=blocks_of_latent_keys,
            instead="draft_window = 256",
        ),
        Row(
            "weights fetched while layers run (offload_group_size)",
            REFUSED,
            "layers share buffers, which are right only if every pass runs all layers",
            refusal=engine(offload_group_size=4),
            instead="cpu_offload_gb",
        ),
        Row(
            "keys of a speculative_config that are for other methods",
            REFUSED,
            "they would change nothing",
            refusal=unused_key,
            instead="leave it out",
        ),
    ),
    "Draft weights": (
        Row("shared (the target's own)", YES, "nothing is copied", LOSSLESS, CASES),
        Row(
            "fp8",
            YES,
            "on CUDA for bfloat16 models and GPUs of capability 8.9 or more",
            COPIES + "test_copies_draft_and_however_wrong_they_are_the_output_is_the_targets",
            CASES,
        ),
        Row(
            "int8, int4",
            YES,
            "groups of 64; on CUDA for bfloat16 models",
            COPIES + "test_copies_draft_and_however_wrong_they_are_the_output_is_the_targets",
            CASES,
        ),
        Row(
            "copies with tensor parallelism",
            YES,
            "each rank copies its share",
            TWO + "test_two_ranks_draft_on_their_shares_of_weights_and_experts",
            f"{CASES} (int8 and int4 on two H200, int4 on two H100)",
        ),
        Row(
            "copies of experts",
            YES,
            "router and shared experts stay the target's own",
            COPIES + "test_experts_are_copied_and_however_wrong_they_are_the_output_is_the_targets",
            f"{CASES} (Mixtral; Qwen3-MoE in fp8)",
        ),
        Row(
            "copies fitted to data (draft_weights_path)",
            YES,
            "",
            "engine/test_fit_weights.py::test_fitted_copies_draft_better_and_the_output_is_the_targets",
            CASES,
        ),
        Row(
            "copies fitted to data, with tensor parallelism",
            REFUSED,
            "the file holds whole weights",
            refusal=lambda: refusals.refuse_fitted_copies("a file", 2),
            instead="copies that are made at load",
        ),
        Row(
            "copies with expert parallelism",
            REFUSED,
            "",
            gpu="-",
            refusal=weights("fp8", is_moe=True, expert_parallel=True),
            instead="allowed: shared",
        ),
        Row(
            "copies of quantised weights",
            YES,
            "made of what the target's quantised layers multiply by, a layer at a time",
            WORKS_WITH + "test_quantised_targets",
            CASES,
        ),
        Row(
            "copies of quantised experts",
            REFUSED,
            "",
            gpu="-",
            refusal=weights("fp8", quantization="awq", is_moe=True),
            instead="allowed: shared",
        ),
        Row(
            "integer copies where a rank's rows do not divide into groups of 64",
            REFUSED,
            "",
            gpu="-",
            refusal=weights("int8", row_lengths=(96,)),
            instead="shared",
        ),
        Row(
            "fp8 on an older GPU, or of a model that is not bfloat16",
            REFUSED,
            "",
            gpu="-",
            refusal=weights("fp8", device="cuda", dtype="float16"),
            instead="shared",
        ),
    ),
}

NOT_TRIED = (
    "`method: skip` with adapters",
    "vLLM 0.33.0: what was compared with its source, and what was run, is in `vllm_plugin/releases/` and `selfspec "
    "doctor`",
)
"""Nothing is known to be wrong with these, and nobody has run them."""

HEAD = """
Each row that works has been run in an engine of vLLM 0.32.0: tiny models, whose greedy output has to be that of the
same engine without drafts, while some drafts are accepted and some are not. `tests/contract/compatibility.py` names the
test of each row, and these tables are made of it (`python tests/contract/test_compatibility.py`); on a GPU the rows are
cases of `tests/gpu/test_v2_lossless.py`. What is refused is refused before the engine starts, with a message that says
what to do instead.

"Tried" on a GPU means vLLM 0.32.0 on one NVIDIA H100 or H200 (tensor parallelism: two), in batch-invariant mode.
"""


COLUMNS = "| with | works | what to know | on a CPU | on a GPU |"


def part() -> str:
    """The part of docs/limits.md that says what works with what."""
    parts = [HEAD]
    for title, rows in ROWS.items():
        parts.append(f"\n### {title}\n\n{COLUMNS}\n|---|---|---|---|---|\n")
        parts += [_line(row) for row in rows]
        if title == "Models":
            parts.append(architecture_table.section(architecture_table.lines()))
        if title == "Requests":
            parts.append(field_table.section())
    parts.append("\n### Not tried\n\n" + "".join(f"- {each}\n" for each in NOT_TRIED))
    return "".join(parts)


def _line(row: Row) -> str:
    note = "; ".join(part for part in (row.note, f"instead: {row.instead}" if row.instead else "") if part)
    tested = "refusal tested" if row.works in (REFUSED, BY_VLLM) else "tested" if row.cpu else "not tried"
    gpu = "-" if row.works == REFUSED else row.gpu
    return f"| {row.what} | {row.works} | {note} | {row.on_cpu or tested} | {gpu} |\n"
