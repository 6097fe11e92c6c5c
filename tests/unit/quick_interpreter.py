"""A plugin of pytest: kernels in Triton's interpreter, launched quickly."""

from selfspec_cli.vllm_plugin.interpreted import launch_quickly


def pytest_configure() -> None:
    launch_quickly()
