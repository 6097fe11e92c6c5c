"""What shows each row of the tables of docs/limits.md: the page says what works, compatibility.toml names the test, and
this file what we refuse. A row is named by the beginning of its first cell."""

from __future__ import annotations

import tomllib
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
SHOWN = tomllib.loads((Path(__file__).parent / "compatibility.toml").read_text(encoding="utf-8"))


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
    ("sessions whose input streams in", lambda: refusals.refuse_streamed_input()),
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
