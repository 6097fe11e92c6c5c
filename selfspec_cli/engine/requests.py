"""Requests of any kind to a live engine, and what came back: for checks that look at more than tokens and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.engine.live import Engine

MISSING = -100.0  # nats; far below any that a model gives to a token that was taken


@dataclass(frozen=True)
class Request:
    """One request.

    prompt: token ids. tokens: generated at most. params: fields of vLLM's SamplingParams that differ from a greedy
    request that ignores end-of-text and is not detokenized; under "structured" those of StructuredOutputsParams.
    """

    prompt: list[int]
    tokens: int
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Whether each token is the most likely one."""
        return not self.params.get("temperature")


@dataclass(frozen=True)
class Answer:
    """What a request got.

    tokens: of its first sample. ended: vLLM's finish reason and stop reason. scores: log-probabilities of the tokens
    themselves, MISSING where vLLM reports those of other tokens only; None where they were not asked for.
    """

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
    """Run requests with `batch` of them in flight; answers in the order of the requests.

    waves: the next requests begin when all of those before have ended, so that no prompt shares a step with tokens that
    are generated. between: called before each step of the engine with the number of steps so far.
    """
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
    """Log-probability (nats) of a token after `prefix`, by the engine alone in its batch. after: tokens behind it,
    which change nothing but how many come in one step with it."""
    return float(_prompt_logprobs(engine, [*prefix, token, *after], 0)[len(prefix)][token].logprob)


def preferred(engine: Engine, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """By how much at most (nats, from 0) another token is likelier than one of `tokens` at its place after `prompt`, by
    the engine alone in its batch. 0: each is the likeliest."""
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
    """Log-probabilities (nats) of every token of the vocabulary after each prefix; for small vocabularies. The engine
    must have been started with max_logprobs of at least the vocabulary's size."""
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


def preempt_all(engine: Engine) -> None:
    """Throw every running request out of the KV cache; each is computed again from its tokens."""
    engine.llm.reset_prefix_cache(reset_running_requests=True)


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
