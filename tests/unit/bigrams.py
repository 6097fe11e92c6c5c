"""An engine without vLLM whose log-probabilities can be worked out by hand: what tests of scores begin from.

A token is scored by the token before it alone: -((3 * before + 5 * token) % 7 + 1) / 4 nats, and half as much again
under `skip`, as if that knew the text less well. Nothing of it is a distribution; nothing here needs one."""

import itertools
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

from selfspec_cli.config.schema import Method, RunConfig
from selfspec_cli.early_exit.counters import VerifyCounts
from selfspec_cli.engine.live import Generation
from selfspec_cli.record.statistics import RequestTimes

VOCAB = 64


def without_vllm(monkeypatch):
    """A module in vLLM's place that has what asks for samples."""
    module = ModuleType("vllm")
    module.SamplingParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)


def nats(before, token, method=Method.baseline):
    """What the fake says of one token."""
    return ((3 * before + 5 * token) % 7 + 1) / 4 * (1.5 if method is Method.skip else 1.0)


class Tokenizer:
    """Characters as tokens."""

    eos_token_id, bos_token_id, name_or_path = 1, None, "characters"

    def encode(self, text, add_special_tokens=False):
        return [ord(letter) % VOCAB for letter in text]


@dataclass
class LLM:
    method: Method
    answer: str = "x"
    asked: list = field(default_factory=list)

    def get_tokenizer(self):
        return Tokenizer()

    def generate(self, prompts, params, use_tqdm):
        assert not use_tqdm and len(prompts) == len(params)
        return [self._one(prompt["prompt_token_ids"], one) for prompt, one in zip(prompts, params, strict=True)]

    def _one(self, ids, params):
        self.asked.append((ids, params))
        if getattr(params, "prompt_logprobs", None) is None:
            return SimpleNamespace(outputs=[SimpleNamespace(text=self.answer)])
        places = [None]
        for before, token in itertools.pairwise(ids):
            value = -nats(before, token, self.method)
            places.append({token: SimpleNamespace(logprob=value, rank=1 if token % 2 else 2)})
        return SimpleNamespace(prompt_logprobs=places)


@dataclass
class Engine:
    """What the stages ask of `engine.live.Engine`."""

    cfg: RunConfig
    max_model_len: int = 64
    accepted: int = 3

    def __post_init__(self):
        self.llm = LLM(self.cfg.method)
        self.gates = []

    def encode(self, text):
        return Tokenizer().encode(text)

    def set_gate(self, kind, threshold):
        self.gates.append((kind, threshold))

    def verify_counts(self):
        return VerifyCounts(1, 2, len(self.llm.asked), [1]) if self.cfg.method is Method.layer_skip else None

    def generate(self, prompts, output_len, *, batch, temperature, seed):
        """Greedy: the baseline's, but for `skip`; sampled: every method's own."""
        drafts = self.cfg.method is Method.layer_skip
        skip = self.cfg.method is Method.skip
        shift = 7 * skip if temperature == 0 else 2 * drafts + 11 * skip
        outputs = [[(prompt[-1] + shift + place) % VOCAB for place in range(output_len)] for prompt in prompts]
        times = [RequestTimes(0.0, (0.1,), output_len) for _ in prompts]
        verified = VerifyCounts(1, 4, self.accepted, [self.accepted]) if drafts else None
        return Generation(outputs, 1.0, times, verified)
