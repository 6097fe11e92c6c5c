"""Faults that `selfspec verify` and `selfspec check` plant in an engine of their own, to show that they find them.

v1.py and v2.py change outputs on each model runner, speed.py costs speed alone, spoil.py spoils a KV cache. Two more,
of the verify pass, are part of every verification: `selfspec_cli/vllm_plugin/planted/`. The worker there imports this
package where selfspec runs from a checkout.
"""
