"""The tables of what early exit works with, the refusals and the tests are in step.

python tests/contract/test_compatibility.py      writes the tables of architectures and of fields into docs/limits.md
"""

import ast
import dataclasses
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import architecture_table
import field_table
import pytest
from compatibility import BY_VLLM, ONES, PAGE, PLAIN, RECORDS, REFUSALS, REFUSED, TESTS, Row, rows
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.record import archive
from selfspec_cli.vllm_plugin import refusals

pytestmark = pytest.mark.contract

REPO = Path(__file__).parents[2]
ALL = rows()
OURS = [row for row in ALL if row.table == REFUSED and not row.note.startswith(BY_VLLM)]


def named(beginning: str) -> Row:
    """The row of a name; of several that begin so the first of that very name."""
    found = [row for row in ALL if row.what.startswith(beginning)]
    exact = [row for row in found if row.what == beginning]
    (row,) = exact if len(found) > 1 else found
    return row


def with_tables(text: str) -> str:
    """The page with the tables that are generated written anew."""
    for part in (architecture_table.section(architecture_table.lines()), field_table.section()):
        heading = part.strip().splitlines()[0]
        text = re.sub(
            rf"\n{heading}\n.*?(?=\n### )", lambda _, part=part: part.rstrip("\n") + "\n", text, flags=re.DOTALL
        )
    return text


def test_the_page_has_the_tables_of_architectures_and_fields():
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_tables(text), "run: python tests/contract/test_compatibility.py"


@pytest.mark.parametrize(("name", "refuse"), REFUSALS)
def test_what_is_refused_is_refused_with_what_to_do_instead(name, refuse):
    assert named(name).instead and named(name).instead in message(refuse)


def test_a_row_says_what_tried_it():
    """A test that is there, or a GPU; and only what we refuse has a refusal of ours."""
    assert len(ALL) > 60
    assert [row.what for row in OURS] == list(dict.fromkeys(named(name).what for name, _ in REFUSALS))
    assert all(row.note for row in OURS)
    tried = [named(name) for names in TESTS.values() for name in names]
    by_vllm = {row.what for row in ALL if row.table == REFUSED} - {row.what for row in OURS}
    assert by_vllm == {"trace_decode_token_ids"}
    assert {row.what for row in tried} == {row.what for row in ALL if "CPU" in row.shown} | by_vllm
    assert len({row.what for row in tried}) == len(tried)
    for test in TESTS:
        file, _, name = test.partition("::")
        tree = ast.parse((REPO / "tests" / "engine" / f"{file}.py").read_text(encoding="utf-8"))
        assert f"test_{name}" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


MOE, QUANTISED = ("mixtral", "qwen3_moe", "llama4"), ("+int4", "+gptq", "+awq")
SEEN = {  # the beginning of a row's name -> whether a case on a GPU is one of it; of (case, engine, spec)
    "tensor parallelism": lambda case, engine, spec: "tensor_parallel_size" in engine,
    "expert parallelism": lambda case, engine, spec: "enable_expert_parallel" in engine,
    "mixture of experts": lambda case, engine, spec: case["model"] in MOE,
    "latent attention (MLA)": lambda case, engine, spec: case["model"] == "deepseek_v2",
    "quantised targets": lambda case, engine, spec: is_quantised(case),
    "multimodal models": lambda case, engine, spec: case["requests"] == "pictures",
    "vLLM's Transformers backend": lambda case, engine, spec: engine.get("model_impl") == "transformers",
    "positions of several dimensions": lambda case, engine, spec: case["model"].endswith("+positions"),
    "LoRA requests": lambda case, engine, spec: "enable_lora" in engine,
    "drafts drawn": lambda case, engine, spec: spec.get("draft_sample_method") == "probabilistic",
    "preemption": lambda case, engine, spec: "kv_cache_memory_bytes" in engine,
    "torch.compile, eager": lambda case, engine, spec: "compilation_config" in engine,
    "draft length by batch size": lambda case, engine, spec: "num_speculative_tokens_per_batch_size" in spec,
    "draft length by load": lambda case, engine, spec: "length_table" in spec,
    "drafts from a request's own text": lambda case, engine, spec: "free_drafts" in spec,
    "weights replaced": lambda case, engine, spec: case["requests"] == "replaced",
    "an engine that sleeps": lambda case, engine, spec: case["requests"] == "asleep",
    "layers left out": lambda case, engine, spec: "skip_layers" in spec,
    "drafts with a window": lambda case, engine, spec: "draft_window" in spec,
    "drafts over the blocks": lambda case, engine, spec: "blocks" in spec.get("draft_context", ""),
    "fp8": lambda case, engine, spec: spec.get("draft_weights") == "fp8",
    "int8, int4": lambda case, engine, spec: spec.get("draft_weights") in ("int8", "int4"),
    "copies with tensor parallelism": lambda case, engine, spec: (
        "draft_weights" in spec and "tensor_parallel_size" in engine
    ),
    "copies of experts": lambda case, engine, spec: "draft_weights" in spec and case["model"] in MOE,
    "copies fitted to data (": lambda case, engine, spec: "draft_weights_path" in spec,
    "copies of quantised weights": lambda case, engine, spec: "draft_weights" in spec and is_quantised(case),
}


def is_quantised(case):
    return "quantization" in case["engine"] or case["model"].endswith(QUANTISED)


@pytest.fixture(scope="module")
def on_a_gpu():
    """Every case of the published records in which early exit changed no output, though some drafts were accepted."""
    found = []
    for name in RECORDS:
        document = json.loads(archive.read_text(REPO / "results" / "published" / name))
        parts = document["groups"].values() if "groups" in document else [document]
        found += [case for part in parts for case in part["cases"] if "model" in case]
    return [case for case in found if case["accepted"] and not case["different"]]


@pytest.mark.parametrize("name", SEEN)
def test_a_row_says_tried_on_a_gpu_where_a_record_shows_it_and_nowhere_else(name, on_a_gpu):
    row = next(row for row in ALL if row.what.startswith(name) and row.shown)
    shown = any(SEEN[name](case, case["engine"], case["spec"]) for case in on_a_gpu)
    assert ("GPU" in row.shown) == shown, row


def test_every_refusal_of_ours_has_a_row():
    """Each function that refuses, each argument of which early exit takes 1 only, each property of a model."""
    functions = {name for name in vars(refusals) if name.startswith("refuse_")}
    covered = {
        "refuse_engine": set(refusals.ONE_ONLY) | {"watermark_config", "offload_group_size", "enable_elastic_ep"},
        "refuse_model": set(refusals.NO_TARGETS),
    }
    # A gate without an expression for CUDA is another package's own, and its message names that gate.
    others = {"adapters", "fitted_copies", "runner", "gate", "context", "latents", "streamed_input"}
    assert functions == {*covered, *(f"refuse_{name}" for name in others)}, "a new refusal wants a row"
    said = "\n".join(message(refuse) for _, refuse in REFUSALS)
    for name in covered["refuse_engine"]:
        assert f"{name} =" in said or f"{name} is" in said, name
    raises = inspect.getsource(refusals.refuse_engine).count("raise SettingsError")
    assert raises == 4, "a new refusal of engine arguments wants a row"
    for reason in refusals.NO_TARGETS.values():
        assert reason in said
    phrases = (
        "enable_lora = True",
        "as a pooling model",
        "has no meaning for method",
        "model runner",
        "draft_weights_path is",
        "draft_window =",
        "(MLA)",
        "input that streams in",
    )
    for phrase in phrases:
        assert phrase in said


def test_every_field_of_a_request_is_in_its_table():
    known = field_table.runpy.run_path(str(field_table.FILE))
    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")} - known["OF_VLLM"]
    assert field_table.fields() == fields
    assert set(known["NOTES"]) <= fields
    assert set(known["REFUSED"]) <= set(known["NOTES"]), "what is refused has its reason"
    assert set(known["V2_FIELDS"]) <= set(known["REFUSED"])


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


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
