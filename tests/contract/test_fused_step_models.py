"""What of vLLM's the kernel for a whole trunk relies on (vllm_plugin/fused_step)."""

import importlib
import inspect
import logging

import pytest
import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

from selfspec_cli.vllm_plugin.fused_step import models
from selfspec_cli.vllm_plugin.fused_step.drafting import fused_step

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("name", [*models.MODELS, *models.LAYERS])
def test_the_models_that_it_knows_exist(name):
    module, _, kind = name.partition(".")
    found = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), kind)
    assert models._name(found) == name


@pytest.mark.parametrize("name", models.LAYERS)
def test_their_layers_are_what_the_kernel_does(name):
    module, _, kind = name.partition(".")
    layer = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), kind)
    lines = [line.split("#")[0].strip() for line in inspect.getsource(layer.forward).splitlines()]
    body = " ".join(line for line in lines if line)
    norms = [f"self.{name}(hidden_states, residual)" for name in ("input_layernorm", "post_attention_layernorm")]
    for step in (*norms, "self.self_attn(", "self.mlp(hidden_states)", "return hidden_states, residual"):
        assert step in body


def test_rotary_embeddings_that_only_have_other_tables_inherit_their_forward():
    for kind in (Llama3RotaryEmbedding, YaRNScalingRotaryEmbedding):
        assert kind.forward_native is RotaryEmbedding.forward_native


def test_the_log_says_once_what_runs_instead(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    reason = "a reason that no other test has"
    monkeypatch.setattr("selfspec_cli.vllm_plugin.fused_step.drafting.reason_against", lambda *_: reason)
    with caplog.at_level(logging.INFO, logger="vllm.selfspec"):
        for _ in range(2):
            assert fused_step(torch.nn.Module(), None, torch.device("cpu")) is None
    records = {id(record): record for record in caplog.records}  # a handler may have one at two loggers
    said = [record.getMessage() for record in records.values() if "draft step" in record.getMessage()]
    assert said == [f"draft step: kernels for single products, because {reason}"]
