"""The pages' lines for vLLM, read by vLLM's own parsers."""

from __future__ import annotations

import ast
import inspect
import re

import pytest
from first_lines import INDEX, README, of_kind, python_blocks
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.metrics import loggers
from vllm.v1.spec_decode import metrics

from selfspec_cli.early_exit.resolved import ResolvedSettings

pytest.importorskip("vllm")
pytestmark = pytest.mark.contract

SERVE = of_kind("vllm", README, INDEX)


@pytest.mark.parametrize("words", SERVE, ids=" ".join)
def test_vllms_parser_reads_the_line_that_serves(words):
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words[2:])
    validate_parsed_serve_args(arguments)
    assert arguments.model_tag == "MODEL"
    settings = ResolvedSettings.from_user(arguments.speculative_config, 32)
    assert settings.method == "layer_skip"


def test_the_keys_in_python_are_of_vllms_class_and_ours():
    calls = [
        node
        for block in python_blocks(README, INDEX)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LLM"
    ]
    assert calls
    known = {*inspect.signature(LLM.__init__).parameters, *inspect.signature(EngineArgs).parameters}
    for call in calls:
        given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        assert given.keys() <= known
        ResolvedSettings.from_user(given["speculative_config"], 32)


def test_the_metrics_to_watch_are_vllms():
    named = [name for words in of_kind("curl", INDEX) for name in re.findall(r"\w{6,}", " ".join(words))]
    wanted = [name for name in named if name.startswith(("spec_decode", "num_requests"))]
    assert len(wanted) == 2
    source = inspect.getsource(loggers) + inspect.getsource(metrics)
    for name in wanted:
        assert f"vllm:{name.rstrip('_')}" in source
