"""lm-evaluation-harness on engines without vLLM: what it asks of a model, offline tasks, reported scores."""

import math
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import bigrams
import pytest
from bigrams import nats
from commands import refused
from scripts import importable

from selfspec_cli.config.schema import ConfigError, GateConfig, Method, RunConfig
from selfspec_cli.record import quality
from selfspec_cli.texts import corpora, library, questions

pytest.importorskip("lm_eval")

import itertools

from lm_eval import tasks

from selfspec_cli.stages import evaluate
from selfspec_cli.stages.evaluate import LiveModel

ROOT = Path(__file__).parents[2]
BASELINE = RunConfig(method=Method.baseline)
GATED = RunConfig(layer=3, k=4, gate=GateConfig(kind="varH"), threshold=4.0)
SKIP = RunConfig(method=Method.skip, layer=3)


@pytest.fixture(autouse=True)
def vllm(monkeypatch, tmp_path):
    bigrams.without_vllm(monkeypatch)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def few_modules_and_folders():
    """A hundred questions of three modules, and two folders of the harness's own tasks: all of them take seconds."""
    texts = library.held_out_text()[:3]
    folders = [Path(tasks.__file__).parent / name for name in ("arc", "hellaswag")]

    def manager(include_defaults):
        return tasks.TaskManager(include_defaults=False, include_path=folders if include_defaults else None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "held_out_text", lambda: texts)
        patch.setattr(questions, "MOST", 100)
        patch.setattr(evaluate, "TaskManager", manager)
        yield


def model(**changes):
    return LiveModel(bigrams.Engine(BASELINE, **changes))


def request(*args):
    return SimpleNamespace(args=args)


def ids(text):
    return bigrams.Tokenizer().encode(text)


def along(tokens):
    return sum(nats(*pair) for pair in itertools.pairwise(tokens))


def test_a_continuation_is_scored_after_its_context():
    (pair, alone) = model().loglikelihood([request("abc", "de"), request("", "de")], disable_tqdm=True)
    assert pair[0] == pytest.approx(-along(ids("cde")))
    assert pair[1] is False  # the fake finds odd tokens the likeliest
    assert alone[0] == pytest.approx(-along([1, *ids("de")]))  # after end-of-text, for want of a beginning
    (long,) = model(max_model_len=8).loglikelihood([request("abcdefgh", "ijk")], disable_tqdm=True)
    assert long[0] == pytest.approx(-along(ids("hijk")))  # of a long context the end is kept


def test_a_whole_text_is_scored_in_windows_that_meet():
    text = "a text that is longer than the model"
    for room in (9, 12, 64):
        (found,) = model(max_model_len=room).loglikelihood_rolling([request(text)])
        assert found == pytest.approx(-along([1, *ids(text)]))


def test_generation_takes_what_the_task_asks():
    wrapped = model()
    wanted = {"until": ["\n", ""], "max_gen_toks": 9, "temperature": 0.0, "do_sample": False, "top_p": 0.5}
    assert wrapped.generate_until([request("a" * 100, wanted), request("b", {"until": "."})]) == ["x", "x"]
    (first, asked), (_, default) = wrapped.engine.llm.asked
    assert len(first) == 64 - 9
    assert (asked.stop, asked.max_tokens, asked.temperature, asked.top_p) == (["\n"], 9, 0.0, 0.5)
    assert (default.stop, default.max_tokens) == (["."], 63)  # 256, if the model took so many


def test_questions_are_the_same_ones_every_time_and_have_one_answer():
    choice, line = questions.stdlib_choice(), questions.stdlib_line()
    assert choice == questions.stdlib_choice()
    assert (len(choice), len(line)) == (100, 100)
    texts = ["\n".join(row.rstrip() for row in text.splitlines()) for _, text in library.held_out_text()]
    for one in choice[:50]:
        assert len(set(one["choices"])) == 4
        right = one["context"] + one["choices"][one["answer"]] + "\n"
        assert any(right in text for text in texts)
    for one in line[:50]:
        assert one["rest"] and "\n" not in one["rest"]
        assert any(one["context"] + one["rest"] + "\n" in text for text in texts)
    assert len({one["answer"] for one in choice[:50]}) == 4


@contextmanager
def open_engine(cfg):
    engine = bigrams.Engine(cfg, max_model_len=2048)
    if cfg.method is Method.skip:
        engine.llm.answer = "other"
    yield engine


def test_scores_say_what_went_through_drafting():
    tasks = evaluate.load(["stdlib_choice", "stdlib_line"])
    found = evaluate.run([GATED, SKIP], tasks, limit=12, fewshot=0, open_engine=open_engine)
    assert found.failed == []
    scores = {
        one.arm["arm"]: {(score["task"], score["metric"]): score for score in one.found["scores"]}
        for one in found.findings
    }
    assert set(scores) == {"baseline", "layer_skip", "skip"}
    metrics = {("stdlib_choice", "acc"), ("stdlib_choice", "acc_norm"), ("stdlib_line", "exact_match")}
    assert set(scores["skip"]) == metrics
    line, choice = (scores["layer_skip"][name] for name in (("stdlib_line", "exact_match"), ("stdlib_choice", "acc")))
    assert (line["drafted"], choice["drafted"], line["same"], choice["same"]) == (True, False, 12, 12)
    assert scores["skip"]["stdlib_line", "exact_match"]["same"] == 0
    assert scores["baseline"]["stdlib_line", "exact_match"]["same"] is None
    assert not scores["skip"]["stdlib_line", "exact_match"]["drafted"]
    p = choice["value"]
    assert choice["stderr"] == pytest.approx(math.sqrt(p * (1 - p) / 11))
    columns = quality.read("results").columns(found.findings[1].arm_key, "")
    assert columns["scores_protocol"].endswith("limit=12 num_fewshot=0")
    assert "stdlib_line exact_match 0.000 ± 0.000 (drafted)" in columns["scores"]


def test_a_model_that_knows_two_answers_of_three_scores_that_share(monkeypatch):
    (task,) = evaluate.load(["stdlib_line"])
    answers = {tuple(ids(one["context"])): one["rest"] for one in questions.stdlib_line()}

    def knowing(llm, tokens, params):
        llm.asked.append((tokens, params))
        text = answers[tuple(tokens)] if len(llm.asked) % 3 else "?"
        return SimpleNamespace(outputs=[SimpleNamespace(text=text)])

    monkeypatch.setattr(bigrams.LLM, "_one", knowing)
    found = evaluate.run([BASELINE], [task], limit=12, fewshot=0, open_engine=open_engine)
    assert found.findings[0].found["scores"][0]["value"] == pytest.approx(8 / 12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["stdlib_lin"], "did you mean 'stdlib_line'"),
        (["hellaswg"], "did you mean 'hellaswag'"),
        ([], "names no task"),
        (["stdlib_line", "stdlib_line"], "is named twice"),
    ],
)
def test_a_task_that_there_is_not_is_refused(names, words):
    with pytest.raises(ConfigError, match=words):
        evaluate.load(names)
    assert words in refused("eval", "--tasks", ",".join(names), "--dry-run")


@pytest.mark.slow
def test_a_task_whose_data_cannot_be_had_says_what_to_do(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"arc_easy: its data set cannot be loaded .*HF_ENDPOINT.*stdlib_line"):
        evaluate.load(["arc_easy"])


def test_arc_and_hellaswag_run_over_local_files(monkeypatch, tmp_path):
    """Where no hub can be reached: the harness's own tasks, over folders that are called as the data sets are."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with importable(ROOT / "experiments") as module:
        module("local_tasks").write(tmp_path)
    for task in evaluate.load(["arc_easy", "hellaswag"]):
        docs = list(task.test_docs() if task.has_test_docs() else task.validation_docs())
        assert len(docs) == 100
        assert {len(task.doc_to_choice(doc)) for doc in docs} == {4}
        assert {int(task.doc_to_target(doc)) for doc in docs} == {0, 1, 2, 3}
        assert all(task.doc_to_text(doc).strip() for doc in docs)
    (_, turns), *_ = corpora.documents("conversations.jsonl", 1)
    assert "_renamed" in turns and "def " in turns
