"""Scores of given text, and text generated until a stop: what perplexity and evaluations ask of a live engine.

Scores are prompt log-probabilities. An engine computes them in its own full pass over the prompt, and no draft is made
there: for a verified arm they are the target's, for `skip` those of the truncated model with its head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Sampling:
    """How one request generates: until end-of-text, a stop string, or its longest output.

    temperature: 0 is greedy. seed: of this request's sampling. other: further fields of vLLM's SamplingParams.
    """

    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    other: dict[str, Any] = field(default_factory=dict)


def score(engine: Engine, passages: Sequence[Passage], progress: Progress = ignore) -> list[Score]:
    """The log-likelihood of each passage under this engine's own predictive distribution.

    Raises:
        ValueError: a passage without context, without a token to score, or too long: the engine is asked for one token
            more, so that a passage may have `max_model_len - 1`.
    """
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
    scores: dict[int, Score] = {}

    def take(chunk: Sequence[int]) -> None:
        for index, output in zip(
            chunk, _run(engine, [passages[i].ids for i in chunk], [params] * len(chunk)), strict=True
        ):
            scores[index] = _score(passages[index], output.prompt_logprobs)

    _chunks(order, take, "scored", progress)
    return [scores[index] for index in range(len(passages))]


def _score(passage: Passage, logprobs: Sequence[Any]) -> Score:
    scored = [
        ranked[token] for token, ranked in zip(passage.ids[passage.context :], logprobs[passage.context :], strict=True)
    ]
    return Score(sum(token.logprob for token in scored), len(scored), all(token.rank == 1 for token in scored))


def complete(
    engine: Engine, prompts: Sequence[list[int]], sampling: Sequence[Sampling], progress: Progress = ignore
) -> list[str]:
    """The text that each prompt is continued with, without the stop string; the engine drafts as the arm does."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            seed=request.seed if request.temperature > 0 else None,
            stop=list(request.stop) or None,
            **request.other,
        )
        for request in sampling
    ]
    texts: list[str] = []

    def take(chunk: Sequence[int]) -> None:
        for output in _run(engine, [prompts[i] for i in chunk], [params[i] for i in chunk]):
            texts.append(str(output.outputs[0].text))

    _chunks(range(len(prompts)), take, "completed", progress)
    return texts


def _run(engine: Engine, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[Any]:
    return list(engine.llm.generate([{"prompt_token_ids": ids} for ids in prompts], list(params), use_tqdm=False))


def _chunks(order: Sequence[int], take: Callable[[Sequence[int]], None], what: str, progress: Progress) -> None:
    for start in range(0, len(order), CHUNK):
        with interrupts.deferred():
            take(order[start : start + CHUNK])
        progress(what, min(start + CHUNK, len(order)), len(order))
