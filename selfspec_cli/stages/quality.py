"""What `bench` says of quality: the perplexity of some held-out text. `selfspec ppl` finds it with an interval."""

from selfspec_cli.config.schema import Method, RunConfig
from selfspec_cli.engine import scoring
from selfspec_cli.engine.live import Engine
from selfspec_cli.engine.scoring import Passage
from selfspec_cli.record.quality import perplexity as of_scores
from selfspec_cli.texts import library

WINDOW = 512  # tokens; long enough that most tokens have hundreds of tokens of context
OWN_DISTRIBUTION = (Method.baseline, Method.skip)
"""Methods whose predictions of a given text are their own. Prompt log-probabilities of an arm that drafts are the
target's, drafts or none, so that its figure would be the baseline's whatever it generates."""


def perplexity(engine: Engine, cfg: RunConfig) -> float | None:
    """exp of the mean negative log-likelihood over about `cfg.perplexity_tokens` held-out tokens; None where an arm has
    none of its own, or it is not wanted.

    Windows are drawn as for prompts; every token but a window's first is predicted from all of its window before it.
    """
    tokens = cfg.perplexity_tokens
    if not tokens or cfg.method not in OWN_DISTRIBUTION:
        return None
    # One token less than the model takes, because scoring a window asks the engine for one more.
    length = min(WINDOW, engine.max_model_len - 1, tokens + 1)
    count = max(1, tokens // (length - 1))
    windows = library.token_windows(engine.encode, library.held_out_text(), length, count, cfg.seed)
    scores = scoring.score(engine, [Passage(window) for window in windows])
    return of_scores([-one.log_likelihood for one in scores], [one.tokens for one in scores])
