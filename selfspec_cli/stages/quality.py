"""Perplexity on held-out text, of whatever distribution an engine decodes from."""

from __future__ import annotations

from selfspec_cli.engine.live import Engine
from selfspec_cli.engine.live import perplexity as from_log_likelihood
from selfspec_cli.texts import library

WINDOW = 512  # tokens; long enough that most tokens have hundreds of tokens of context


def perplexity(engine: Engine, tokens: int, seed: int) -> float:
    """exp of the mean negative log-likelihood over about `tokens` held-out tokens.

    Windows are drawn as for prompts and scored with a rolling context: every token but a window's first is predicted
    once, from all tokens of its window before it (the definition of lm-evaluation-harness's rolling log-likelihood).
    """
    # One token less than the model takes, because scoring a window asks the engine for one more.
    length = min(WINDOW, engine.max_model_len - 1, tokens + 1)
    count = max(1, tokens // (length - 1))
    windows = library.token_windows(engine.encode, library.held_out_text(), length, count, seed)
    return from_log_likelihood(*engine.log_likelihood(windows))
