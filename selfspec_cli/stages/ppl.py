"""Perplexity, twice: of a given text under the arm's own predictions, and of what the arm generates under the plain
model's.

The first is for the baseline and for `skip`. An arm that verifies its drafts has none of its own: an engine computes
prompt log-probabilities in the target's full pass, no draft has a part in them, and the difference would be zero
whatever the arm generates. What can go wrong there is in what comes out. So every arm continues the same held-out
prompts, greedily and sampled, and the plain model scores the continuations of both sides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec_cli import interrupts
from selfspec_cli.artifacts import head_files
from selfspec_cli.config.schema import ConfigError, RunConfig
from selfspec_cli.early_exit.head_metadata import read_metadata
from selfspec_cli.engine import scoring
from selfspec_cli.engine.live import Engine, Generation, OpenEngine
from selfspec_cli.engine.scoring import Passage
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import folder as results
from selfspec_cli.record import quality
from selfspec_cli.record.quality import GREEDY, SAMPLED, Scores
from selfspec_cli.stages import arms
from selfspec_cli.stages.arms import Found
from selfspec_cli.stages.bench import OWN_DISTRIBUTION
from selfspec_cli.stages.plan import Planned
from selfspec_cli.texts import corpora, library


@dataclass(frozen=True)
class Request:
    """What to score.

    documents, document_tokens: most documents of the corpus, and most tokens of each, from its beginning.
    window, stride: `library.rolling`. prompts: continued, of prompt_tokens each, drawn from the documents; 0 for none.
    length: tokens generated for each. temperature: of the sampled continuations. held_out: see `corpora.documents`.
    """

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
        """Refuse what cannot be scored; raises ConfigError."""
        corpora.check(self.corpus)
        for name in ("documents", "document_tokens", "window"):
            if getattr(self, name) < (1 if name == "documents" else 2):
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: too few")
        if not 1 <= self.stride < self.window:
            raise ConfigError(f"--stride {self.stride}: it must be from 1 to the window less 1, {self.window - 1}")
        if self.prompts < 0 or min(self.prompt_tokens, self.length) < 1:
            raise ConfigError("--prompts must be 0 or more, --prompt-tokens and --length 1 or more")
        if not self.temperature > 0:
            raise ConfigError(f"--temperature {self.temperature:g}: it is of the sampled continuations, and above 0")

    def of_text(self, documents: int) -> dict[str, Any]:
        """The protocol of the text's perplexity."""
        return {
            "corpus": self.corpus,
            "part": "held-out" if self.held_out else None,
            "documents": documents,
            "document_tokens": self.document_tokens,
            "window": self.window,
            "stride": self.stride,
        }

    def of_generated(self) -> dict[str, Any]:
        """The protocol of the generated continuations."""
        return {
            "corpus": self.corpus,
            "prompts": self.prompts,
            "prompt_tokens": self.prompt_tokens,
            "length": self.length,
            "temperature": self.temperature,
        }


@dataclass(frozen=True)
class _Text:
    """Documents as token ids, and the prompts drawn from them."""

    names: list[str]
    ids: list[list[int]]
    prompts: list[list[int]]


@dataclass(frozen=True)
class _Continuations:
    """What one arm generated."""

    planned: Planned
    parts: dict[str, Generation]


def run(
    cfgs: Sequence[RunConfig],
    request: Request,
    *,
    open_engine: OpenEngine,
    progress: Progress = ignore,
    run_id: str | None = None,
) -> Found:
    """Score the baseline of each model and engine, then every arm; each finding is on disk as soon as it is complete.

    The plain model is started twice where arms generate something: at first for the text and its own continuations, at
    the end to score those of the arms, which are lost if the command ends before that.

    Raises:
        ConfigError: a corpus that cannot be had, a results folder that cannot be written or is in use.
    """
    request.check()
    families = arms.families(cfgs)
    held_out = any(_fitted_on(planned.cfg, request.corpus) for family in families for planned in family)
    with interrupts.deferred(), results.writing(arms.folder(cfgs)):
        found = Found()
        documents = corpora.documents(request.corpus, request.documents, held_out=held_out)
        if held_out:
            request = Request(**vars(request) | {"held_out": True})
        for family in families:
            _Job(request, documents, open_engine, progress, found, run_id or results.new_run_id()).run(family)
    return found


def _fitted_on(cfg: RunConfig, corpus: str) -> bool:
    """Whether a config decodes or drafts through a head that was fitted on this corpus."""
    if cfg.method not in ("skip", "layer_skip") or corpus in ("stdlib", "random") or cfg.layer is None:
        return False
    path = head_files.full_head(cfg, cfg.layer)
    return path is not None and path.suffix != ".pt" and read_metadata(path).corpus == corpus


@dataclass
class _Job:
    """One run of the command."""

    request: Request
    documents: list[tuple[str, str]]
    open_engine: OpenEngine
    progress: Progress
    found: Found
    run_id: str

    def run(self, family: list[Planned]) -> None:
        """The baseline, the arms engine by engine, and the baseline again for what they generated."""
        base, rest = family[0], family[1:]
        try:
            with self.open_engine(base.cfg) as engine:
                text = self._read(engine)
                scores = self._score_text(engine, text)
                plain = self._generate(engine, base.cfg, text)
                plain_scores = {
                    name: self._score(engine, text, generation.outputs) for name, generation in plain.items()
                }
        except results.RecordError:
            raise
        except Exception as error:  # nothing can be compared with it
            self.found.failed += [arms.failure(planned, error) for planned in family]
            return
        self._save_text(base, base, text, scores, None)
        self._save_generated(base, base, plain, plain_scores, plain, plain_scores)
        continuations: list[_Continuations] = []

        def arm(engine: Engine, planned: Planned) -> None:
            if planned.cfg.method in OWN_DISTRIBUTION:
                self._save_text(planned, base, text, self._score_text(engine, text), scores)
            continuations.append(_Continuations(planned, self._generate(engine, planned.cfg, text)))

        self.found.failed += arms.each(rest, self.open_engine, arm, lambda n: self.progress("arms", n, len(rest)))
        if text.prompts and continuations:
            self._compare(base, text, continuations, plain, plain_scores)

    def _compare(
        self,
        base: Planned,
        text: _Text,
        continuations: list[_Continuations],
        plain: dict[str, Generation],
        plain_scores: dict[str, Scores],
    ) -> None:
        """Score on the plain model what the arms generated, and save it."""
        waiting = list(continuations)
        try:
            with self.open_engine(base.cfg) as engine:
                while waiting:
                    continuation = waiting[0]
                    theirs = {
                        name: self._score(engine, text, generation.outputs, (plain[name].outputs, plain_scores[name]))
                        for name, generation in continuation.parts.items()
                    }
                    self._save_generated(continuation.planned, base, continuation.parts, theirs, plain, plain_scores)
                    waiting.pop(0)
        except results.RecordError:
            raise
        except Exception as error:
            self.found.failed += [arms.failure(continuation.planned, error) for continuation in waiting]

    def _read(self, engine: Engine) -> _Text:
        request = self.request
        if request.window >= engine.max_model_len:
            raise ConfigError(
                f"--window {request.window}: it must be less than the model's {engine.max_model_len} tokens"
            )
        pairs = [
            (name, library.leading_tokens(engine.encode, body, request.document_tokens))
            for name, body in self.documents
        ]
        pairs = [(name, ids) for name, ids in pairs if len(ids) > 1]
        if not pairs:
            raise ConfigError(f"corpus={request.corpus}: no document has two tokens")
        if request.prompts and request.prompt_tokens + request.length >= engine.max_model_len:
            raise ConfigError(
                f"--prompt-tokens {request.prompt_tokens} and --length {request.length}: together they "
                f"must be fewer than the model's {engine.max_model_len} tokens"
            )
        prompts = []
        if request.prompts:
            try:
                prompts = library.token_windows(
                    engine.encode, self.documents, request.prompt_tokens, request.prompts, engine.cfg.seed
                )
            except ValueError as error:
                raise ConfigError(f"corpus={request.corpus}: {error}; ask for fewer or shorter --prompts") from error
        return _Text([name for name, _ in pairs], [ids for _, ids in pairs], prompts)

    def _score_text(self, engine: Engine, text: _Text) -> Scores:
        places = [
            (number, *place)
            for number, ids in enumerate(text.ids)
            for place in library.rolling(len(ids), self.request.window, self.request.stride)
        ]
        passages = [Passage(text.ids[number][start:end], scored - start) for number, start, scored, end in places]
        scores = Scores([0.0] * len(text.ids), [0] * len(text.ids))
        for (number, *_), passage in zip(places, scoring.score(engine, passages, self.progress), strict=True):
            scores.nats[number] -= passage.log_likelihood
            scores.tokens[number] += passage.tokens
        return scores

    def _generate(self, engine: Engine, cfg: RunConfig, text: _Text) -> dict[str, Generation]:
        if not text.prompts:
            return {}
        batch = min(cfg.engine.max_num_seqs, len(text.prompts))
        return {
            name: engine.generate(text.prompts, self.request.length, batch=batch, temperature=warmth, seed=cfg.seed)
            for name, warmth in ((GREEDY, 0.0), (SAMPLED, self.request.temperature))
        }

    def _score(
        self,
        engine: Engine,
        text: _Text,
        outputs: Sequence[list[int]],
        baseline: tuple[Sequence[list[int]], Scores] | None = None,
    ) -> Scores:
        """Continuations under a plain engine. known: those of the baseline, whose score an equal one has."""
        same = [baseline is not None and output == baseline[0][at] for at, output in enumerate(outputs)]
        fresh = iter(
            scoring.score(
                engine,
                [
                    Passage([*prompt, *output], len(prompt))
                    for prompt, output, equal in zip(text.prompts, outputs, same, strict=True)
                    if not equal
                ],
                self.progress,
            )
        )
        nats = [
            baseline[1].nats[at] if equal and baseline else -next(fresh).log_likelihood for at, equal in enumerate(same)
        ]
        return Scores(nats, [len(output) for output in outputs])

    def _save_text(self, planned: Planned, base: Planned, text: _Text, scores: Scores, baseline: Scores | None) -> None:
        if not all(map(math.isfinite, scores.nats)):
            said = "gives some tokens of the text the probability zero, as a draft vocabulary does"
            said += "; its perplexity is infinite, and not recorded"
            self.found.warnings.append(f"{arms.label(planned)}: it {said}")
            return
        document = {"documents": text.names, "scores": vars(scores), "baseline": baseline and vars(baseline)}
        self._save(planned, base, quality.TEXT, self.request.of_text(len(text.names)), document)

    def _save_generated(
        self,
        planned: Planned,
        base: Planned,
        parts: dict[str, Generation],
        scores: dict[str, Scores],
        plain: dict[str, Generation],
        plain_scores: dict[str, Scores],
    ) -> None:
        if not parts:
            return
        by_sampling: dict[str, Any] = {}
        for name, generation in parts.items():
            same = sum(ours == theirs for ours, theirs in zip(generation.outputs, plain[name].outputs, strict=True))
            against = None if planned is base else {"baseline": vars(plain_scores[name]), "identical": same}
            accepted = generation.verified.accepted if generation.verified is not None else None
            drafts = {"drafted": generation.drafted, "accepted": accepted} if planned.cfg.method == "layer_skip" else {}
            if drafts and not accepted:
                self.found.warnings.append(
                    f"{arms.label(planned)}: no draft was accepted in the {name} continuations; "
                    "that they are the baseline's says nothing about drafting"
                )
            by_sampling[name] = (
                {"scores": vars(scores[name]), "outputs": len(generation.outputs)} | (against or {}) | drafts
            )
        self._save(planned, base, quality.GENERATED, self.request.of_generated(), by_sampling)

    def _save(
        self, planned: Planned, base: Planned, kind: str, protocol: dict[str, Any], document: dict[str, Any]
    ) -> None:
        finding = arms.finding(planned, base, kind, self.run_id, protocol, document)
        results.save_finding(Path(planned.cfg.results_dir), finding)
        self.found.findings.append(finding)
