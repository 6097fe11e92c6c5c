"""Faults that `selfspec verify` and `selfspec check` plant in an engine of their own, to show that they find them.

No module of this package is imported by any other: an engine has them only if it was started with the worker extension
`selfspec_cli.vllm_plugin.planted.worker.FaultyWorker`, which is what `stages/verify` and `stages/gate` ask for.
"""
