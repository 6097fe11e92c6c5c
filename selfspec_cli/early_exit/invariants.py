"""What must not happen while a model drafts, whatever the speed is. Each is counted on a live engine
(`vllm_plugin/observe/watch.py`), and a performance check asks for 0 of it."""

INVARIANTS = {
    "host_synchronisations": "times that the host waited for the device inside `propose`",
    "allocations": "tensors allocated on the device inside `propose`",
    "host_copies": "values copied from the device to the host inside `propose`",
    "eager_steps": "decoding and draft steps that ran neither compiled nor in a CUDA graph",
    "unrolled_rounds": "rounds whose draft loop could not end on the device",
    "sampled_rows": "requests that were not greedy",
    "finished_rows": "requests that were drafted for after their last token",
    "closed_rows": "requests that took part in a draft step after their gate had closed",
}
"""Name -> what is counted. A name is either counted, or not applicable to an engine for a reason that is given."""
