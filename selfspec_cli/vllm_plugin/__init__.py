"""Everything that touches vLLM's internals. Runs in vLLM's own processes; knows `early_exit` and nothing above itself.

compat.py       which vLLM, which of its names are replaced, and why (data)
spec_config.py  `speculative_config={"method": "layer_skip", ...}` -> a config vLLM knows, plus our DraftSettings
trunk.py        the target's first E layers as a module of their own: shared weights, no copy
fp8_copies.py   8-bit copies of those weights, for `draft_weights` "fp8"
v1_proposer.py  the draft loop on the V1 model runner (CPU)
loaded_model.py what is done to a model once it is loaded: cut it (method `skip`), or tap it (fitting)
worker.py       calls from the driver into live workers: thresholds, counters, collection, memory
"""


def register() -> None:
    """Entry point of `vllm.general_plugins`; vLLM calls it in each of its processes, sometimes twice.

    Replaces nothing that acts before a user asks for early exit. Raises RuntimeError on another vLLM version.
    """
    from selfspec_cli.vllm_plugin import compat

    compat.apply("config")
