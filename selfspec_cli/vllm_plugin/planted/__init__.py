"""Faults that `selfspec verify` plants in each of its runs, to show that it would find them, and the worker for it.

No module of this package is imported by any other: an engine has them only if it was started with the worker extension
`selfspec_cli.vllm_plugin.planted.worker.FaultyWorker`, as `stages/verify` and `stages/check` ask for. The faults of
`--plant` are in the repository alone, in tests/packages/faults."""
