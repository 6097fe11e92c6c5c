"""vLLM's V2 model runner, the production one, on a CPU: its kernels run in Triton's interpreter.

Triton decides when it is imported whether to interpret, and vLLM then takes V2 for every engine of the process. So
these tests need a process of their own: `pytest tests/engine/v2`. Among other tests they are skipped."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    paths = [Path(word.partition("::")[0]).resolve() for word in config.args]
    if all(HERE in (path, *path.parents) for path in paths):
        from selfspec_cli.vllm_plugin.interpreted import interpret_kernels

        interpret_kernels()
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a process of its own: pytest tests/engine/v2"))
