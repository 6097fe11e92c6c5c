"""Early-exit self-speculation, the method itself: torch, safetensors and the standard library, nothing else.

One line per room:

    reference.py     the whole method in plain PyTorch, to read first and to compare with
    settings.py      what a user may ask for, checked: exit layer, draft length, head, gate, threshold
    errors.py        the one error for settings, and the nearest right spelling
    registry.py      objects by name: a folder's modules and other packages' entry points; no torch
    gates/           the gates, one object in one module each: rule, statistic, device expression, help, colour
    draft_log.py     the record of real drafts: every statistic and every verdict
    replay.py        what a gate would have made of a log
    roc.py           how well each statistic tells drafts that stand from drafts that fall
    head_spec.py     which head is meant, by a short name; no torch
    heads/           the kinds of exit heads, one object in one module each: grammar, tensors, fit, transform; no torch
    head_metadata.py what a head's file says of it, checked without its tensors; no torch
    head_module.py   a head that runs; draft vocabularies
    draft_weights/   the kinds of weights that a draft runs on, one object in one module each; no torch
    contexts/        what a draft attends to, one object in one module each; no torch
    view.py          what drafts, as one object: layers, weights, context, head, vocabulary; no torch
    layers.py        which layers draft, as users write them; no torch
    data_aware.py    copies of a weight made for the data that it meets: GPTQ's rounding
    fitted_weights.py  such copies on disk, tied to the model that they were made of
    draft_vocab.py   which tokens a draft may be: the most frequent ones, or a list
    artifact.py      heads on disk: saved and loaded whole
    legacy.py        safe import of older .pt heads
    fingerprint.py   a short stable name for a model
    equations.py     streaming least squares, in closed form
    fitting.py       heads fitted by it; agreement with the full model on held-out data; choice of the ridge
    rule.py          how much to draft before each step, by measured times and acceptance; no torch
    confidence.py    how far a draft's own confidence can be trusted, learnt from verdicts
    defaults.py      what drafts where a user names nothing; no torch
    cost_model.py    what a round costs and what it returns: counted in bytes, or fitted to what was timed

Nothing is imported here, so that `settings` stays importable without paying for torch.
"""
