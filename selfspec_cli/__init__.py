"""selfspec: early-exit self-speculative decoding inside vLLM, and the bench on which it is measured.

The packages, in the order in which imports may run:

    commands/      the command line: words in, exit codes out
    stages/        the verbs: plan, sweep, load, fit, roc, tune, doctor, check; measure.py is the measuring loop,
                   preflight.py refuses what could not run, verify/ shows that an arm is lossless
    report/        points in; tables, figures and the page out
    gateway/       the control layer in front of servers: which backend answers, what is cached, what that gained
    engine/        the only construction of vllm.LLM, and what stages ask of it
    vllm_plugin/   the only place that knows vLLM's internals; runs in its workers
    texts/         prompts, and text to fit and to score on
    record/        a measured point as one file, and the tables made of points
    config/        the schema and every default, model facts and fingerprints, files of heads and tuned settings; keys
                   say which points are equal
    load_patterns/ how requests arrive in a load test: one file a pattern
    early_exit/    the method itself: settings, gates, heads, cost model; needs torch alone

progress.py, interrupts.py, children.py and extras.py serve all of them: progress bars, Ctrl-C, child processes, what
to install for a module.
"""

__version__ = "0.1.0"
