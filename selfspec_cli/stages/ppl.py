"""Perplexity, twice: of a given text under the arm's own predictions, and of what the arm generates under the plain
model's.

The first is for the baseline and for `skip`. An arm that verifies its drafts has none of its own: an engine computes
prompt log-probabilities in the target's full pass, without drafts. What can go wrong there is in what comes out. So
every arm continues the same held-out prompts, greedily and sampled, and the plain model scores both sides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.config import model_files
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.early_exit.head_metadata import read_metadata
from selfspec_cli.engine import requests
from selfspec_cli.engine.live import Engine, Generation, OpenEngine
from selfspec_cli.engine.requests import Passage
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import folder as results
from selfspec_cli.record import quality
from selfspec_cli.record.quality import GREEDY, SAMPLED, Scores
from selfspec_cli.stages import arms
from selfspec_cli.stages.arms import Found
from selfspec_cli.stages.measure import OWN_DISTRIBUTION
from selfspec_cli.stages.plan import Planned, results_dir
from selfspec_cli.texts import corpora, library


@dataclass(frozen=True)
class Request:
    """What to score. documents, document_tokens: at most, of the corpus and of each. window, stride: `library.rolling`.
    prompts: continued, of prompt_tokens each, drawn from the documents; 0 for none. length: tokens generated for each.
    temperature: of the sampled continuations. held_out: see `corpora.documents`."""

    corpus: str = "stdlib"
    documents: int = 1000
    document_tokens: int = 2048
    window: int = 512
    stride: int = 256
    prompts: int = 64
    prompt_tokens: int = 32
    length: int = 64
    temperature: float = 1.0
    held_out: bool = False

    def check(self) -> None:
        """Refuse what the command line lets pass and cannot be scored; raises ConfigError."""
        corpora.check(self.corpus)
        if not 1 <= self.stride < self.window:
            raise ConfigError(f"--stride {self.stride}: it must be from 1 to the window less 1, {self.window - 1}")
        if not self.temperature > 0:
            raise ConfigError(f"--temperature {self.temperature:g}: it is of the sampled continuations, and above 0")

    def of_text(self, documents: int) -> dict[str, Any]:
        """The protocol of the text's perplexity."""
        chosen = {"corpus": self.corpus, "part": "held-out" if self.held_out else None, "documents": documents}
        return chosen | {name: getattr(self, name) for name in ("document_tokens", "window", "stride")}

    def of_generated(self) -> dict[str, Any]:
        """The protocol of the generated continuations."""
        names = ("corpus", "prompts", "prompt_tokens", "length", "temperature")
        return {name: getattr(self, name) for name in names}


def run(cfgs: Sequence[RunConfig], request: Request, *, open_engine: OpenEngine, progress: Progress = ignore) -> Found:
    """Score the baseline of each model and engine, then every arm; each finding is on disk as soon as it is complete.
    The plain model starts again to score what arms generated. Raises ConfigError: no corpus, or results folder."""
    request.check()
    families = arms.families(cfgs)
    held_out = any(_fitted_on(planned.cfg, request.corpus) for family in families for planned in family)
    request = replace(request, held_out=held_out)
    with interrupts.deferred(), results.writing(results_dir(cfgs)):
        found = Found()
        documents = corpora.documents(request.corpus, request.documents, held_out=held_out)
        for base, *others in families:
            _Family(base, request, open_engine, progress, found, results.new_run_id()).run(others, documents)
    return found


def _fitted_on(cfg: RunConfig, corpus: str) -> bool:
    if cfg.method not in ("skip", "layer_skip") or corpus in ("stdlib", "random") or cfg.layer is None:
        return False
    path = model_files.full_head(cfg, cfg.layer)
    return path is not None and path.suffix != ".pt" and read_metadata(path).corpus == corpus


@dataclass
class _Family:
    """One model and engine: its baseline, and what arms are compared with. names, ids: of the documents, the latter as
    token ids. prompts: drawn from them. plain: by way to sample, what the baseline generated and its scores."""

    base: Planned
    request: Request
    open_engine: OpenEngine
    progress: Progress
    found: Found
    run_id: str
    names: list[str] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    plain: dict[str, tuple[Generation, Scores]] = field(default_factory=dict)

    def run(self, others: list[Planned], documents: list[tuple[str, str]]) -> None:
        """The baseline, the arms engine by engine, and the baseline again for what they generated."""
        try:
            with self.open_engine(self.base.cfg) as engine:
                self._read(engine, documents)
                text = self._score_text(engine)
                for name, generation in self._generate(engine, self.base.cfg).items():
                    self.plain[name] = generation, self._score(engine, generation.outputs)
        except Exception as error:  # nothing can be compared with it
            self.found.failed += [arms.failure(planned, error) for planned in (self.base, *others)]
            return
        self._save_text(self.base, text, None)
        self._save_generated(self.base, self.plain)
        waiting: list[tuple[Planned, dict[str, Generation]]] = []

        def arm(engine: Engine, planned: Planned) -> None:
            if planned.cfg.method in OWN_DISTRIBUTION:
                self._save_text(planned, self._score_text(engine), text)
            waiting.append((planned, self._generate(engine, planned.cfg)))

        self.found.failed += arms.each(others, self.open_engine, arm, self.progress)
        if not (self.prompts and waiting):
            return
        try:
            with self.open_engine(self.base.cfg) as engine:
                while waiting:
                    planned, made = waiting[0]
                    scored = {name: (one, self._score(engine, one.outputs, name)) for name, one in made.items()}
                    self._save_generated(planned, scored)
                    waiting.pop(0)
        except results.RecordError:
            raise
        except Exception as error:
            self.found.failed += [arms.failure(planned, error) for planned, _ in waiting]

    def _read(self, engine: Engine, documents: list[tuple[str, str]]) -> None:
        request = self.request
        if request.window >= engine.max_model_len:
            raise ConfigError(
                f"--window {request.window}: it must be less than the model's {engine.max_model_len} tokens"
            )
        for name, body in documents:
            ids = library.leading_tokens(engine.encode, body, request.document_tokens)
            if len(ids) > 1:
                self.names.append(name)
                self.ids.append(ids)
        if not self.names:
            raise ConfigError(f"corpus={request.corpus}: no document has two tokens")
        if not request.prompts:
            return
        if request.prompt_tokens + request.length >= engine.max_model_len:
            raise ConfigError(
                f"--prompt-tokens {request.prompt_tokens} and --length {request.length}: together they "
                f"must be fewer than the model's {engine.max_model_len} tokens"
            )
        asked = request.prompt_tokens, request.prompts, engine.cfg.seed
        try:
            self.prompts = library.token_windows(engine.encode, documents, *asked)
        except ValueError as error:
            raise ConfigError(f"corpus={request.corpus}: {error}; ask for fewer or shorter --prompts") from error

    def _score_text(self, engine: Engine) -> Scores:
        places = [
            (number, *place)
            for number, ids in enumerate(self.ids)
            for place in library.rolling(len(ids), self.request.window, self.request.stride)
        ]
        passages = [Passage(self.ids[number][start:end], scored - start) for number, start, scored, end in places]
        scores = Scores([0.0] * len(self.ids), [0] * len(self.ids))
        for (number, *_), passage in zip(places, requests.score(engine, passages, self.progress), strict=True):
            scores.nats[number] -= passage.log_likelihood
            scores.tokens[number] += passage.tokens
        return scores

    def _generate(self, engine: Engine, cfg: RunConfig) -> dict[str, Generation]:
        if not self.prompts:
            return {}
        batch = min(cfg.engine.max_num_seqs, len(self.prompts))
        return {
            name: engine.generate(self.prompts, self.request.length, batch=batch, temperature=warmth, seed=cfg.seed)
            for name, warmth in ((GREEDY, 0.0), (SAMPLED, self.request.temperature))
        }

    def _score(self, engine: Engine, outputs: Sequence[list[int]], name: str | None = None) -> Scores:
        """Continuations under a plain engine. name: of the way to sample; equal outputs have the baseline's score."""
        nats: dict[int, float] = {}
        if name is not None:
            theirs, scores = self.plain[name]
            nats = {at: scores.nats[at] for at, output in enumerate(outputs) if output == theirs.outputs[at]}
        fresh = [at for at in range(len(outputs)) if at not in nats]
        passages = [Passage([*self.prompts[at], *outputs[at]], len(self.prompts[at])) for at in fresh]
        for at, score in zip(fresh, requests.score(engine, passages, self.progress), strict=True):
            nats[at] = -score.log_likelihood
        return Scores([nats[at] for at in range(len(outputs))], [len(output) for output in outputs])

    def _save_text(self, planned: Planned, scores: Scores, baseline: Scores | None) -> None:
        if not all(map(math.isfinite, scores.nats)):
            self.found.warnings.append(
                f"{arms.label(planned)}: it gives some tokens of the text the probability zero, as a draft vocabulary "
                "does; its perplexity is infinite, and not recorded"
            )
            return
        document = {"documents": self.names, "scores": vars(scores), "baseline": baseline and vars(baseline)}
        protocol = self.request.of_text(len(self.names))
        arms.keep(self.found, planned, self.base, quality.TEXT, self.run_id, protocol, document)

    def _save_generated(self, planned: Planned, scored: dict[str, tuple[Generation, Scores]]) -> None:
        if not scored:
            return
        document: dict[str, Any] = {}
        for name, (generation, scores) in scored.items():
            found = document[name] = {"scores": vars(scores), "outputs": len(generation.outputs)}
            if planned is not self.base:
                theirs, baseline = self.plain[name]
                same = sum(ours == plain for ours, plain in zip(generation.outputs, theirs.outputs, strict=True))
                found |= {"baseline": vars(baseline), "identical": same}
            if planned.cfg.method == "layer_skip":
                accepted = generation.verified.accepted if generation.verified is not None else None
                found |= {"drafted": generation.drafted, "accepted": accepted}
                if not accepted:
                    self.found.warnings.append(
                        f"{arms.label(planned)}: no draft was accepted in the {name} continuations; "
                        "that they are the baseline's says nothing about drafting"
                    )
        protocol = self.request.of_generated()
        arms.keep(self.found, planned, self.base, quality.GENERATED, self.run_id, protocol, document)
