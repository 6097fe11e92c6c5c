"""Early-exit self-speculation, the method itself: torch, safetensors and the standard library, nothing else.

    reference.py      the whole method in plain PyTorch, to read first and to compare with

    what a user may ask for (no torch)
    settings.py       every draft setting: exit layer, draft length, head, gate, threshold
    knobs.py          how a setting is declared: help, range, choices, keys
    resolved.py       a speculative_config as an engine works with it, and one request's own
    defaults.py       what drafts where a user names nothing
    view.py           which part of the model drafts: layers, weights, context, head, vocabulary
    length_table.py   upper limits of the draft length by load
    errors.py         the one error for settings, and the nearest right spelling
    sprint_aliases.py the first sprint's words as today's settings

    registries (no torch): objects by name, and other packages' entry points (registry.py)
    gates/            rule, statistic, device expression, help, colour
    heads/            kinds of exit heads, and which head a short name means
    draft_weights/    the weights that a draft runs on
    contexts/         the context that a draft attends to

    heads and copies on disk
    head_metadata.py  the metadata of a head's file, checked without its tensors; no torch
    artifact.py       heads with their tensors; the fingerprint of a model
    head_module.py    a head that runs; draft_vocab.py: which tokens a draft may be
    fitting.py        heads fitted by least squares (equations.py), and the scale of their outputs
    fitted_weights.py copies of weights that are made from data

    how much to draft, and what it was worth
    rule.py           before each step, by measured times and acceptance; confidence.py, free_drafts.py: inside it
    counters.py       what drafting did
    draft_log.py      every statistic and verdict of real drafts; replay.py: what a gate would have made of them
    cost_model.py     what a round costs: counted in bytes, or fitted to timed arms

Nothing is imported here, so that `settings` stays importable without paying for torch."""
