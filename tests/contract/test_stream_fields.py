"""Names of what vLLM streams in a chat, which `selfspec load --chat` counts by what they are: all but the role."""

import pytest
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall

pytestmark = pytest.mark.contract


def test_a_part_of_a_chat_has_a_role_and_what_the_model_wrote():
    assert set(DeltaMessage.model_fields) == {"role", "content", "reasoning", "tool_calls"}


def test_a_part_of_a_call_has_the_servers_own_id_and_type():
    assert set(DeltaToolCall.model_fields) == {"id", "type", "index", "function"}
    assert set(DeltaFunctionCall.model_fields) == {"name", "arguments"}
