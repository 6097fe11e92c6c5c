"""Drafting on vLLM's V2 model runner, which is what runs on CUDA. For somebody who knows CUDA graphs:

A step of vLLM's runner is one verify pass of the target over all requests, then sampling, then `propose`, which drafts
for the next step. The host runs one step ahead of the device: it schedules and launches step n + 1 before it has seen
the tokens of step n. So everything that depends on those tokens (who drafts, how much, from which token) is decided by
kernels, from tensors that stay on the device, and the host never waits for the device.

Read in this order:

speculator.py         `propose`: a round as the host launches it. Host, once a step.
state.py              the tensors that a round lives in, the gate in force, and the record of drafts. Device memory,
                      changed between rounds.
round_setup.py        one kernel (matches.py and worth.py add theirs around it): what the verify pass left becomes
                      the first draft step's inputs, and how much each row may draft: by the table of limits by load, by
                      its request's wishes, and by its request's end.
draft_loop.py         a draft step, the loop over steps, and its CUDA graph for each batch size. Launched once a round.
device_loop.py        the WHILE node of that graph, which ends on the device when every gate is closed; and what
                      tensor-parallel ranks exchange inside that loop, and whether they can.
kernels.py            the end of a draft step: token, gate statistics, gate, next inputs, counters. Inside the graph.
worth.py              the device function of all gates' statistics, whether another step is worth its time, counters.
matches.py            free drafts: the longest match of a request's last tokens in its own history. Before the loop.
../contexts/          drafts that attend to a part of the context: kernels in front of the loop.

Around the round, on the host:

widths.py             how many draft slots are planned in a step (early_exit/rule.py), and the graphs for them.
scheduling.py         the scheduler plans by them, and learns from its steps.
step_order.py         whether a step's tokens are read before the next step is launched.
runner.py             what a step tells the speculator before its first kernel; steps that run without it; what the
                      rejection sampler does with places that hold no draft, and with chosen tokens.
step_times.py         what steps take on the device, measured on the captured graphs at the start.
graphs.py             graphs of verify passes: a set for each width, and those for mixed prefill and decode batches.

A gate, a threshold, a draft length or a table can change between two rounds without a recapture: all of them are
numbers in device memory. What a graph fixes is shapes: batch size, k, the layers that draft, and a verify pass's width.
"""
