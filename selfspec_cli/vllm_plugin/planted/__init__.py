"""Faults that `selfspec verify` plants in an engine of its own, to show that it would find them.

No module of this package is imported by any other: an engine has them only if it was started with the worker extension
`selfspec_cli.vllm_plugin.planted.worker.FaultyWorker`, which is what `stages/verify` asks for.
"""
