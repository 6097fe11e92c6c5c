"""selfspec: early-exit self-speculative decoding inside vLLM, and the bench on which it is measured.

One line per room, in the order in which imports may run:

    app.py         Typer commands: words in, exit codes out            output.py     tables, JSON, error messages
    compose.py     Hydra: (experiment, overrides) -> [RunConfig]
    stages/        one verb a file: sweep, bench, fit, report, doctor
    report/        pure: rows in; table, chart and page out
    tracking.py    Weights & Biases, or nothing                        provenance.py what produced a row
    engine.py      the only construction of vllm.LLM
    vllm_plugin/   the only place that knows vLLM's internals; runs in its workers
    records.py     a row, and how it gets to disk                      corpus.py     held-out text
    config.py      the schema and every default                        paths.py      where packaged files are
    early_exit/    the method; needs torch alone
"""

__version__ = "0.1.0"
