"""The tables of docs/limits.md (what early exit works with), the refusals and the tests are in step.

The page says what works, and compatibility.toml names the test; what we refuse is refused here. A row is named by the
beginning of its first cell."""

import ast
import dataclasses
import inspect
import json
import runpy
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from selfspec_cli.early_exit.contexts import Context
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS, WeightFacts, require_draft_weights
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.record import archive
from selfspec_cli.vllm_plugin import refusals, spec_config
from selfspec_cli.vllm_plugin.contexts.blocks import Blocks

REPO = Path(__file__).parents[2]
PAGE = REPO / "docs" / "limits.md"
REFUSED, BY_VLLM = "Refused", "by vLLM"
ASKED = runpy.run_path(str(REPO / "tests" / "engine" / "request_fields.py"))
SHOWN = tomllib.loads((Path(__file__).parent / "compatibility.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Row:
    """One line of the page's tables of three columns. table: the heading above it.

    Of what works, `shown` is where that was seen, such as "CPU, GPU (Gemma 3)", and note is what to know. Of what is
    refused, shown is empty, note is the reason, and instead what the refusal has to advise."""

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
    ("V2 model runner on a CPU", partial(refusals.require_runner, "cpu", True, has_triton=False)),
    ("V1 model runner on a GPU", partial(refusals.require_runner, "cuda", False, has_triton=False)),
    ("devices other than", partial(refusals.require_runner, "xpu", None, has_triton=False)),
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


# ---- refusals, tests and rows ---------------------------------------------------------------------------------------

ALL = rows()
OURS = [row for row in ALL if row.table == REFUSED and not row.note.startswith(BY_VLLM)]


def named(beginning: str) -> Row:
    """The row of a name; of several that begin so the first of that very name."""
    found = [row for row in ALL if row.what.startswith(beginning)]
    exact = [row for row in found if row.what == beginning]
    (row,) = exact if len(found) > 1 else found
    return row


@pytest.mark.parametrize(("name", "refuse"), REFUSALS)
def test_what_is_refused_is_refused_with_what_to_do_instead(name, refuse):
    assert named(name).instead and named(name).instead in message(refuse)


def test_a_row_says_what_tried_it():
    """A test that is there, or a GPU; and only what we refuse has a refusal of ours."""
    assert len(ALL) > 60
    assert [row.what for row in OURS] == list(dict.fromkeys(named(name).what for name, _ in REFUSALS))
    assert all(row.note for row in OURS)
    tried = [named(name) for names in SHOWN["tests"].values() for name in names]
    by_vllm = {row.what for row in ALL if row.table == REFUSED} - {row.what for row in OURS}
    assert by_vllm == {"trace_decode_token_ids"}
    assert {row.what for row in tried} == {row.what for row in ALL if "CPU" in row.shown} | by_vllm
    assert len({row.what for row in tried}) == len(tried)
    for test in SHOWN["tests"]:
        file, _, name = test.partition("::")
        tree = ast.parse((REPO / "tests" / "engine" / f"{file}.py").read_text(encoding="utf-8"))
        assert f"test_{name}" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def is_of(case, row):
    """Whether a case of a record is of a row of compatibility.toml."""
    if isinstance(row, list):
        return any(is_of(case, one) for one in row)
    texts = [(case[part].get(key), text) for part in ("engine", "spec") for key, text in row.get(part, {}).items()]
    return (
        all(value is not None and text in str(value) for value, text in texts)
        and case["model"].endswith(tuple(row.get("model", [""])))
        and case["requests"] == row.get("requests", case["requests"])
    )


@pytest.fixture(scope="module")
def on_a_gpu():
    """Every case of the published records in which early exit changed no output, though some drafts were accepted."""
    found = []
    for name in SHOWN["records"]:
        document = json.loads(archive.read_text(REPO / "results" / "published" / name))
        parts = document["groups"].values() if "groups" in document else [document]
        found += [case for part in parts for case in part["cases"] if "model" in case]
    return [case for case in found if case["accepted"] and not case["different"]]


@pytest.mark.parametrize("name", SHOWN["gpu"])
def test_a_row_says_tried_on_a_gpu_where_a_record_shows_it_and_nowhere_else(name, on_a_gpu):
    row = next(row for row in ALL if row.what.startswith(name) and row.shown)
    shown = any(is_of(case, SHOWN["gpu"][name]) for case in on_a_gpu)
    assert ("GPU" in row.shown) == shown, row


def test_every_refusal_of_ours_has_a_row(monkeypatch):
    """Each function that refuses, each argument of which early exit takes 1 only, each property of a model."""
    functions, called = {name: each for name, each in vars(refusals).items() if name.startswith("refuse_")}, set()

    def noting(name, *given):
        called.add(name)
        functions[name](*given)

    for name in functions:
        monkeypatch.setattr(refusals, name, partial(noting, name))
    said = "\n".join(message(refuse) for _, refuse in REFUSALS)
    # `refuse_runner` is `require_runner` by the environment. A gate without an expression for CUDA is another package's
    # own, and its message names that gate.
    assert functions.keys() - called == {"refuse_runner", "refuse_gate"}, "a new refusal wants a row"
    of_engines = [*refusals.ONE_ONLY, "watermark_config", "offload_group_size", "enable_elastic_ep"]
    assert [name for name in of_engines if f"{name} =" not in said and f"{name} is" not in said] == []
    raises = inspect.getsource(functions["refuse_engine"]).count("raise SettingsError")
    assert raises == 4, "a new refusal of engine arguments wants a row"
    assert all(reason in said for reason in refusals.NO_TARGETS.values())


def test_every_kind_of_draft_weights_has_a_row():
    kinds = " ".join(row.what for row in ALL if row.table == "Draft weights")
    assert all(name in kinds for name in DRAFT_WEIGHTS)


def test_arguments_that_early_exit_takes_are_taken():
    refusals.refuse_engine(SimpleNamespace(**PLAIN))
    refusals.refuse_adapters(SimpleNamespace(enable_lora=True), SimpleNamespace(is_moe=False))
    refusals.refuse_adapters(SimpleNamespace(enable_lora=False), SimpleNamespace(is_moe=True))


def test_the_arguments_that_are_refused_are_vllms_own():
    plain = {field.name: field.default for field in dataclasses.fields(EngineArgs)}
    assert {name: plain[name] for name in ONES} == ONES
    assert set(PLAIN) <= set(plain)


def message(refuse) -> str:
    with pytest.raises(SettingsError) as refused:
        refuse()
    return str(refused.value)


# ---- the fields of a request, of which docs/generate/limits_tables.py writes a table


def test_every_field_of_a_request_is_in_its_table():
    theirs = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert theirs == {*ASKED["FIELDS"], *ASKED["REFUSED"], *ASKED["OF_VLLM"]}
    assert set(ASKED["NOTES"]) <= theirs
    assert set(ASKED["REFUSED"]) <= set(ASKED["NOTES"]), "what is refused has its reason"
    assert set(ASKED["V2_FIELDS"]) <= set(ASKED["REFUSED"])
