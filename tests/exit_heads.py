"""Exit heads of each built-in kind from their tensors."""

from selfspec_cli.early_exit.head_module import ExitHead


def lens_head(vocab_ids=None):
    return ExitHead("lens", vocab_ids=vocab_ids)


def lsq_head(weight, bias=None, vocab_ids=None):
    return ExitHead("lsq", {"weight": weight, "bias": bias}, vocab_ids)


def translator_head(weight=None, *, down=None, up=None, bias=None, vocab_ids=None):
    return ExitHead("translator", {"weight": weight, "down": down, "up": up, "bias": bias}, vocab_ids)
