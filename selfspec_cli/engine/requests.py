"""Requests of any kind to a live engine, and what came back: answers, scores of given text, text until a stop.

Scores are prompt log-probabilities. An engine computes them in its own full pass over the prompt, and no draft is made
there: for a verified arm they are the target's, for `skip` those of the truncated model with its head.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.engine.live import Engine
from selfspec_cli.progress import Progress, ignore

MISSING = -100.0  # nats; far below any that a model gives to a token that was taken


@dataclass(frozen=True)
class Request:
    """One request. prompt: token ids. tokens: generated at most. params: fields of vLLM's SamplingParams that are not
    those of a greedy request without end-of-text and text; under "structured" those of StructuredOutputsParams."""

    prompt: list[int]
    tokens: int
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Whether each token is the most likely one."""
        return not self.params.get("temperature")


@dataclass(frozen=True)
class Answer:
    """The first sample of a request. ended: vLLM's finish reason and stop reason. scores: log-probabilities of the
    tokens themselves, MISSING where vLLM reports those of other tokens only; None where they were not asked for."""

    tokens: list[int]
    ended: tuple[Any, Any]
    scores: list[float] | None = None


def answers(
    engine: Engine,
    requests: Sequence[Request],
    *,
    batch: int,
    waves: bool = False,
    between: Callable[[int], None] | None = None,
) -> list[Answer]:
    """Run requests with `batch` of them in flight; answers in their order. waves: the next begin when all before have
    ended, so that no prompt shares a step with generated tokens. between: called before each step with its number."""
    core, found = engine.llm.llm_engine, [Answer([], (None, None))] * len(requests)
    numbers: dict[str, int] = {}
    waiting, steps = list(enumerate(requests))[::-1], 0
    with interrupts.deferred():
        while waiting or core.has_unfinished_requests():
            room = batch - len(numbers) if not (waves and numbers) else 0
            for _ in range(min(room, len(waiting))):
                number, request = waiting.pop()
                name = engine.new_request()
                numbers[name] = number
                core.add_request(name, {"prompt_token_ids": request.prompt}, _parameters(request))
            if between is not None:
                between(steps)
            for output in core.step():
                if output.finished:
                    found[numbers.pop(output.request_id)] = _answer(output)
            steps += 1
            interrupts.check()
    return found


def log_probability(engine: Engine, prefix: Sequence[int], token: int, after: Sequence[int] = ()) -> float:
    """Log-probability (nats) of a token after `prefix`, alone in its batch. after: tokens in the same step."""
    return float(_prompt_logprobs(engine, [*prefix, token, *after], 0)[len(prefix)][token].logprob)


def preferred(engine: Engine, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """By how much at most (nats, from 0) another token is likelier than one of `tokens` at its place after `prompt`."""
    places = _prompt_logprobs(engine, [*prompt, *tokens], 1)[len(prompt) :]
    return float(
        max(
            max(one.logprob for one in place.values()) - place[token].logprob
            for place, token in zip(places, tokens, strict=True)
        )
    )


def _prompt_logprobs(engine: Engine, ids: list[int], count: int) -> list[Any]:
    """Of each token of a prompt vLLM's log-probabilities: its own, and those of the `count` likeliest."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=count, detokenize=False)
    (output,) = engine.llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return list(output.prompt_logprobs)


def next_distribution(engine: Engine, prefixes: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probabilities (nats) of every token after each prefix; the engine's max_logprobs must allow it."""
    from vllm import SamplingParams

    size = engine.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=size, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(prefix)} for prefix in prefixes]
    distributions = []
    for output in engine.llm.generate(prompts, params, use_tqdm=False):
        (scores,) = output.outputs[0].logprobs
        distributions.append([scores[token].logprob for token in range(size)])
    return distributions


def metric(engine: Engine, name: str) -> int:
    """One of vLLM's counters since the engine started; 0 for one that it does not keep."""
    return sum(int(counter.value) for counter in engine.llm.get_metrics() if counter.name == f"vllm:{name}")


def forget_prefixes(engine: Engine) -> None:
    """Empty the prefix cache; nothing may be running."""
    engine.llm.reset_prefix_cache()


def refused(engine: Engine, request: Request) -> str | None:
    """Why vLLM does not take a request, in its own words; None for one that it takes (and runs)."""
    from vllm.exceptions import VLLMClientError

    try:
        answers(engine, [request], batch=1)
    except (VLLMClientError, ValueError) as error:
        return " ".join(str(error).split())[:200]
    return None


def _parameters(request: Request) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = dict(request.params)
    structured = given.pop("structured", None)
    if structured is not None:
        given["structured_outputs"] = StructuredOutputsParams(**structured)
    defaults = {"temperature": 0.0, "max_tokens": request.tokens, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**defaults | given)


def _answer(output: Any) -> Answer:
    sample = output.outputs[0]
    tokens = list(sample.token_ids)
    scores = None
    if sample.logprobs is not None:
        pairs = zip(tokens, sample.logprobs, strict=True)
        scores = [float(places[token].logprob) if token in places else MISSING for token, places in pairs]
    return Answer(tokens, (sample.finish_reason, sample.stop_reason), scores)


CHUNK = 32  # requests handed over at once; progress and interrupts come between two of them


@dataclass(frozen=True)
class Passage:
    """Token ids, of which all after the first `context` are scored, each from all tokens before it."""

    ids: list[int]
    context: int = 1


@dataclass(frozen=True)
class Score:
    """log_likelihood: nats, summed over `tokens` tokens. greedy: whether each of them is the likeliest at its place."""

    log_likelihood: float
    tokens: int
    greedy: bool


def score(engine: Engine, passages: Sequence[Passage], progress: Progress = ignore) -> list[Score]:
    """The log-likelihood of each passage under this engine's own predictions. Raises ValueError: a passage without
    context, without a token to score, or longer than `max_model_len - 1`, as one token more is asked for."""
    for passage in passages:
        if not 1 <= passage.context < len(passage.ids) < engine.max_model_len:
            raise ValueError(
                f"a passage of {len(passage.ids)} tokens, {passage.context} of them context: there must "
                f"be at least one of each, and at most {engine.max_model_len - 1} together"
            )
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    # Long ones first, and equal lengths together: then all steps hold about as many tokens.
    order = sorted(range(len(passages)), key=lambda index: -len(passages[index].ids))
    outputs = _outputs(engine, [passages[index].ids for index in order], [params] * len(order), "scored", progress)
    scores: dict[int, Score] = {}
    for index, output in zip(order, outputs, strict=True):
        ranked = list(zip(passages[index].ids, output.prompt_logprobs, strict=True))[passages[index].context :]
        scored = [by_token[token] for token, by_token in ranked]
        scores[index] = Score(sum(one.logprob for one in scored), len(scored), all(one.rank == 1 for one in scored))
    return [scores[index] for index in range(len(passages))]


def complete(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[Mapping[str, Any]], progress: Progress = ignore
) -> list[str]:
    """The text that each prompt is continued with, without the stop string. params: of vLLM's SamplingParams."""
    from vllm import SamplingParams

    asked = [SamplingParams(**one) for one in params]
    return [str(output.outputs[0].text) for output in _outputs(engine, prompts, asked, "completed", progress)]


def _outputs(
    engine: Engine, prompts: Sequence[list[int]], params: Sequence[Any], what: str, progress: Progress
) -> Iterator[Any]:
    for start in range(0, len(prompts), CHUNK):
        asked = [{"prompt_token_ids": ids} for ids in prompts[start : start + CHUNK]]
        with interrupts.deferred():
            outputs = engine.llm.generate(asked, list(params[start : start + CHUNK]), use_tqdm=False)
        yield from outputs
        progress(what, min(start + CHUNK, len(prompts)), len(prompts))
