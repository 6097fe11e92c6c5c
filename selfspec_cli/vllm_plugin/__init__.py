"""Everything that touches vLLM's internals. Runs in vLLM's own processes; knows `early_exit` and nothing above itself.

detection.py      is early exit asked for? With hooks.py the only code that runs in a plain engine
patches.py        which names of vLLM are replaced, and why; compat.py: how
subclasses.py     what is overridden of vLLM's classes: worker, scheduler, model runners; overrides.py: how one is
                  made, and how an engine gets it; wrap.py: how each override is written
vllm_names.py     the names of vLLM that are imported
releases/         the supported releases, how they differ, and which is installed; seams.toml is all that is used of
                  vLLM, and admission.py looks for it in the source of an untried release
spec_config.py    `speculative_config={"method": "layer_skip", ...}` -> a config vLLM knows, plus our DraftSettings;
                  target_facts.py: the target and this machine, for the choice of what drafts; described.py: the log
refusals.py       what early exit cannot do, refused by name before an engine starts
compile_cache.py  what was compiled once is found again
interpreted.py    the V2 model runner on a CPU, in Triton's interpreter, for tests
decoder.py        where the decoder layers of a loaded model are, whether they can be cut short; step_bytes.py: what a
                  step reads
trunk.py          the draft: a view of the target with some of its layers, and the positions of its steps
exit_head.py      an exit head bound to the loaded model; live_gate.py: the gate of a running engine
attention/        drafting.py: the draft's attention in place of vLLM's; one_query.py: the kernel for it
contexts/         what drafts attend to: base.py is what a kind does to block tables, one module a kind
fused_step/       all decoder layers of a draft step as one kernel: models.py says of which models, drafting.py runs it,
                  layout.py lays out its weights, launch.py compiles it; wide/ is another one for 9 to 64 tokens
weights/          what a draft step multiplies by. shared.py: the target's modules with parts replaced, and its own
                  weights; copied.py: copies of any kind, made for linear layers and experts, and again for weights that
                  are replaced; fp8.py and lowbit.py multiply by them (one_token.py, few_tokens.py), and rounding.py
                  rounds tokens for that
requests.py       what a request asks of drafting (its own draft length or threshold), checked where it comes in
v1/               proposer.py: the draft loop on the V1 model runner (CPU); round.py: a round's requests and KV slots;
                  lengths.py: how long each is drafted for; sampling.py: how it samples, and which requests draft
                  nothing, such as those with min_p or a thinking budget
v2/               the draft loop on the V2 model runner (CUDA); its own docstring says in which order to read it
fitting.py        takes hidden states off forward passes, solves and tests heads in the worker; looks at what linear
                  layers see, and makes copies for it
observe/          profiler.py names what a profiler shows, starts one, and says how busy a GPU was; watch.py counts what
                  must not happen while drafting; metrics.py adds to a server's /metrics what drafting counted,
                  transport.py takes it there
planted/          faults that `selfspec verify` plants in each of its runs, to show that it finds them: worker.py is
                  that engine's worker, v1.py and v2.py the faults on each runner; wrap.py puts them in and out
worker.py         calls from the driver into live workers: thresholds, counters, collection, memory"""


def register() -> None:
    """Entry point of `vllm.general_plugins`; vLLM calls it in each of its processes, sometimes twice. It replaces
    nothing that acts before a user asks for early exit, imports nothing of vLLM's or PyTorch's, and never raises."""
    try:
        from selfspec_cli.vllm_plugin import compat

        compat.register()
    except Exception as error:  # a damaged installation of selfspec must not take vLLM down
        import logging

        logging.getLogger("vllm.selfspec").warning("selfspec could not be loaded and does nothing: %s", error)
