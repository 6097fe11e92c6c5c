"""What vLLM reads from a model's config, without an engine."""

from __future__ import annotations

from typing import Any


def text_config(path: str, trust_remote_code: bool, revision: str | None) -> Any:
    """The transformers config of the language model at `path` (a folder or a Hub id), as vLLM would load it."""
    from vllm.transformers_utils.config import get_config

    return get_config(path, trust_remote_code, revision).get_text_config()
