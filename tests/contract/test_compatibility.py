"""The tables of what early exit works with, the refusals and the tests are in step.

python tests/contract/test_compatibility.py      writes the tables of architectures and of fields into docs/limits.md
"""

import ast
import dataclasses
import inspect
import json
import re
import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import limits_tables
import pytest
from compatibility import BY_VLLM, ONES, PAGE, PLAIN, REFUSALS, REFUSED, SHOWN, Row, rows
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
    for part in (limits_tables.architectures(), limits_tables.fields()):
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


def test_every_field_of_a_request_is_in_its_table():
    known = runpy.run_path(str(limits_tables.ENGINE / "request_fields.py"))
    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")} - known["OF_VLLM"]
    assert limits_tables.named_fields() == fields
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
