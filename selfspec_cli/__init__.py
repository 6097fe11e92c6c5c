"""selfspec: early-exit self-speculative decoding inside vLLM, and the bench on which it is measured.

One line per room, in the order in which imports may run:

    commands/      the command line: words in, exit codes out
    stages/        one verb a file: plan, sweep, bench, fit, heads, roc, tune, doctor
    report/        points in; tables, figures and the page out
    engine/        the only construction of vllm.LLM, and a config as its arguments
    artifacts/     files that commands make for a model: exit heads, calibrations, tuned settings
    vllm_plugin/   the only place that knows vLLM's internals; runs in its workers
    texts/         prompts, held-out text, and what heads are fitted on
    record/        a measured point as one file, and the tables made of points
    config/        the schema, what users type, model facts, fingerprints and the keys of points
    early_exit/    the method itself: settings, gates, heads, cost model; needs torch alone

progress.py, interrupts.py and extras.py serve all of them: progress bars, Ctrl-C, and what to install for a module.
"""

__version__ = "0.1.0"
