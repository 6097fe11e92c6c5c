"""Scores of given text, and text generated until a stop: what perplexity and evaluations ask of a live engine.

Scores are prompt log-probabilities. An engine computes them in its own full pass over the prompt, and no draft is made
there: for a verified arm they are the target's, for `skip` those of the truncated model with its head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.engine.live import Engine
from selfspec_cli.progress import Progress, ignore

CHUNK = 32
"""Requests handed over at once; progress and interrupts come between two of them."""


@dataclass(frozen=True)
class Passage:
    """Token ids, of which all after the first `context` are scored, each from all tokens before it."""

    ids: list[int]
    context: int = 1


@dataclass(frozen=True)
class Score:
    """log_likelihood: nats, summed over the scored tokens. tokens: how many they are. greedy: whether each of them is
    the likeliest token at its place."""

    log_likelihood: float
    tokens: int
    greedy: bool


def score(engine: Engine, passages: Sequence[Passage], progress: Progress = ignore) -> list[Score]:
    """The log-likelihood of each passage under this engine's own predictive distribution. Raises ValueError: a passage
    without context, without a token to score, or too long: the engine is asked for one token more, so that a passage
    may have `max_model_len - 1`."""
    for passage in passages:
        if not 1 <= passage.context < len(passage.ids) < engine.max_model_len:
            raise ValueError(
                f"a passage of {len(passage.ids)} tokens, {passage.context} of them context: there must "
                f"be at least one of each, and at most {engine.max_model_len - 1} together"
            )
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    # Long ones first, and equal lengths together: a step then holds about as many tokens from its first request to
    # its last.
    order = sorted(range(len(passages)), key=lambda index: -len(passages[index].ids))
    outputs = _outputs(engine, [passages[index].ids for index in order], [params] * len(order), "scored", progress)
    scores = {
        index: _score(passages[index], output.prompt_logprobs) for index, output in zip(order, outputs, strict=True)
    }
    return [scores[index] for index in range(len(passages))]


def _score(passage: Passage, logprobs: Sequence[Any]) -> Score:
    scored = [
        ranked[token] for token, ranked in zip(passage.ids[passage.context :], logprobs[passage.context :], strict=True)
    ]
    return Score(sum(token.logprob for token in scored), len(scored), all(token.rank == 1 for token in scored))


def complete(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[Any], progress: Progress = ignore
) -> list[str]:
    """The text that each prompt is continued with, without the stop string; the engine drafts as the arm does. params:
    vLLM's SamplingParams of each request."""
    return [str(output.outputs[0].text) for output in _outputs(engine, prompts, params, "completed", progress)]


def _outputs(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[Any], what: str, progress: Progress
) -> Iterator[Any]:
    """What vLLM gives for each prompt, CHUNK of them at once."""
    for start in range(0, len(prompts), CHUNK):
        asked = [{"prompt_token_ids": ids} for ids in prompts[start : start + CHUNK]]
        with interrupts.deferred():
            outputs = engine.llm.generate(asked, list(params[start : start + CHUNK]), use_tqdm=False)
        yield from outputs
        progress(what, min(start + CHUNK, len(prompts)), len(prompts))
