"""Requests and engine settings that users ask for, on one GPU with the one line: is the output the model's own?

    python experiments/requests/on_gpu.py MODEL OUT.json [--gemma FOLDER] [--smollm2 FOLDER] [--only main,fp8,yarn]

Every engine is a process of its own, all at once: plain vLLM, and `{"method": "selfspec"}` with the same settings. A
row for each case and arm goes into OUT.json as soon as it is known. An arm is `rule`, the one line as it is, or `k=N`,
the same engine with N drafts in every step, so that drafts are made whatever the engine measures while others share
its GPU. A row is `ok` only if drafts were made and some were accepted; under `k=N`, some that the copies made.

`main`, `fp8` and `yarn` run batch-invariant kernels (VLLM_BATCH_INVARIANT=1), and no output may differ. The exception
is `rule` with keys in fp8: FlashAttention 3 reads them in other blocks where a request has more than 64 query rows a KV
head. There, and for Gemma and SmolLM2 (a sliding window, heads of 64: not batch-invariant), an output may differ from
the plain one only where the plain engine's log-probabilities of the two tokens are at most NEAR apart.

Exit code 1 if a row is not ok. Speeds of engines that share a GPU mean nothing, so none is recorded.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfspec_cli.whole import atomic_write

NEAR = 0.25
"""Nats between two tokens that count as almost level: bf16 rounds logits of 16 to 32 to steps of 0.125."""
TOKENS = 96
TOP = 5
"""Log-probabilities of a plain engine's token that are kept, to see how level the two best were."""
TEMPERATURE, MIN_P, PLACES = 1.2, 0.1, 3
ACCEPT = 1e-4
"""p-values of right engines are above it: four are looked at for each arm and four for the plain engine. p = 0.0005 of
1,536 requests may have meant shares that are a sixth off; 4,096 requests bring those below it 99 times of 100."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
ON_GPU: dict[str, Any] = {
    "dtype": "bfloat16",
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},  # engines start sooner
    "gpu_memory_utilization": 0.1,
}
ON_CPU: dict[str, Any] = {"dtype": "float32", "enforce_eager": True}
"""For a try of this script with a small model."""
ENGINES: dict[str, dict[str, Any]] = {
    "main": {"kv_cache_memory_bytes": 3 << 30, "max_model_len": 4096, "enable_sleep_mode": True},
    "fp8": {
        "kv_cache_memory_bytes": 1 << 30,
        "max_model_len": 4096,
        "kv_cache_dtype": "fp8",
        "long_prefill_token_threshold": 8,
    },
    "yarn": {
        "kv_cache_memory_bytes": 6 << 30,
        "max_model_len": 131072,
        "max_num_batched_tokens": 8192,
        "hf_overrides": {
            "rope_parameters": YARN,
            "max_position_embeddings": 131072,
        },  # vLLM does not multiply it itself
    },
    "gemma": {"kv_cache_memory_bytes": 1 << 30, "max_model_len": 4096},
    "smollm2": {"kv_cache_memory_bytes": 1 << 30, "max_model_len": 2048},
}
INVARIANT = ("main", "fp8", "yarn")

Prompts = list[list[int]]
Ask = Callable[[Prompts], list[Any]]


@dataclass
class Case:
    """What is asked of an engine. run: gets what asks, and returns the finished requests. before: done to either engine
    first; drafting_before: to the drafting one alone, in its place. arms: without the rule, if only fixed lengths are
    comparable. acted_on: an earlier case whose plain outputs must be others, or the case shows nothing."""

    name: str
    run: Callable[[Ask], list[Any]]
    params: dict[str, Any]
    before: Callable[[Any], str | None] = lambda _: None
    drafting_before: Callable[[Any], str | None] | None = None
    arms: tuple[str, ...] = ("rule", "k=4")
    same_as: str | None = None
    acted_on: str | None = None


# ---- what both engines are asked -----------------------------------------------------------------------------------


def encoder(llm: Any) -> Callable[[str], list[int]]:
    """A question's token ids: by the model's chat template, where it has one."""
    tokenizer = llm.get_tokenizer()

    def chat(question: str) -> list[int]:
        if tokenizer.chat_template is None:
            return list(tokenizer.encode(question))
        asked_for = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return list(tokenizer.apply_chat_template([{"role": "user", "content": question}], **asked_for))

    return chat


def cases(name: str, llm: Any, paths: Mapping[str, str], few: bool) -> Iterator[Case]:
    """The cases of an engine, in their order: the last ones change its weights. few: for a try on a CPU."""
    from selfspec_cli.texts.questions import asked

    chat, count, size = encoder(llm), 2 if few else 8, 16 if few else TOKENS
    prompts = [ids for kind in ("chat", "coding", "edits") for ids in asked(kind, count, 0, chat, 512)]
    most = 100 if few else 1500
    prompts = [ids[-most:] for ids in prompts]
    greedy = {"max_tokens": size}
    if name in ("gemma", "smollm2"):
        yield Case("greedy, one at a time", lambda ask: [ask([ids])[0] for ids in prompts[::2]], greedy)
        yield Case("greedy, together", lambda ask: ask(prompts), greedy)
        return
    if name == "yarn":
        for length in (200, 300) if few else (2000, 40_000, 130_000):
            ids = long_text(llm, length)
            yield Case(f"context of {len(ids)} tokens", lambda ask, ids=ids: ask([ids]), greedy)
        return
    fixed = ("rule", "k=8") if name == "fp8" else ("rule", "k=4")
    yield Case("greedy", lambda ask: ask(prompts), greedy, arms=fixed)
    if name == "fp8":
        return
    bias = {"logit_bias": biases(llm)}
    yield Case("logit_bias", lambda ask: ask(prompts), greedy | bias, acted_on="greedy")
    texts = [chat(question)[-most:] for question in QUESTIONS]
    yield Case("prefix caching over three turns", lambda ask: talk(ask, texts, chat), greedy)
    same = {"same_as": "greedy", "arms": ("rule",)}
    for level in (1, 2):
        sleep = lambda llm, level=level: asleep(llm, level, paths["model"])  # noqa: E731 - the level of now
        yield Case(f"sleep at level {level}, and wake", lambda ask: ask(prompts), greedy, drafting_before=sleep, **same)
    new = lambda llm: replaced(llm, paths["other"])  # noqa: E731 - the folder is known here alone
    yield Case("weights replaced by reload_weights", lambda ask: ask(prompts), greedy, before=new, acted_on="greedy")
    old = lambda llm: loaded_past_vllm(llm, paths["model"])  # noqa: E731 - as above
    yield Case("weights loaded past vLLM", lambda ask: ask(prompts), greedy, drafting_before=old, **same)


QUESTIONS = (
    "Name three rivers of Europe, and say something about each.",
    "Write a Python function that reverses a linked list.",
    "What is a hash table? Explain it to a beginner.",
    "Plan a week of simple dinners for two people.",
)
NEXT = ("Say the same in other words.", "Now make a list of it, in the same order.")


def talk(ask: Ask, texts: Prompts, chat: Callable[[str], list[int]]) -> list[Any]:
    """Three turns of each conversation; a turn's prompt is all that came before, with the engine's own answers."""
    outputs, prompts = [], texts
    for question in (*NEXT, None):
        answers = ask(prompts)
        outputs += answers
        if question is not None:
            more = chat(question)
            prompts = [ids + list(one.outputs[0].token_ids) + more for ids, one in zip(prompts, answers, strict=True)]
    return outputs


def biases(llm: Any) -> dict[int, float]:
    """Frequent tokens forbidden, and some made likelier."""
    tokenizer = llm.get_tokenizer()
    wanted = {" the": -100.0, ",": -100.0, " a": -100.0, "self": -100.0, " we": 2.0, " this": 2.0, ";": 1.0}
    return {tokenizer.encode(text, add_special_tokens=False)[-1]: value for text, value in wanted.items()}


def long_text(llm: Any, length: int) -> list[int]:
    """Source of Python's standard library of `length` tokens, and a question about its end."""
    encode = llm.get_tokenizer().encode
    question = encode("\n\n# The functions above, with one line on each:\n# 1.", add_special_tokens=False)
    ids: list[int] = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-p]*.py")):
        if len(ids) < length:
            ids += encode(f"# ---- {file.name}\n{file.read_text(encoding='utf-8')[:60_000]}", add_special_tokens=False)
    return ids[: length - len(question)] + question


def runner_of(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def drafter_of(llm: Any) -> Any:
    """What drafts on the engine, on either runner."""
    runner = runner_of(llm)
    return getattr(runner, "speculator", None) or getattr(runner, "drafter", None)


def asleep(llm: Any, level: int, folder: str) -> str | None:
    """Sleep and wake; after a sleep at level 2 the weights are loaded again, as its users do."""
    llm.sleep(level=level)
    llm.wake_up()
    if level == 2:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    return stale(llm)


def replaced(llm: Any, folder: str) -> str | None:
    """Other weights, by vLLM's own call."""
    wait_for(Path(folder) / "complete")
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    llm.reset_prefix_cache()
    return stale(llm)


def loaded_past_vllm(llm: Any, folder: str) -> str | None:
    """Other weights by the model's `load_weights`, as trainers do: copies are stale until the next drafts."""
    import torch
    from safetensors.torch import load_file

    with torch.inference_mode():
        for file in sorted(Path(folder).glob("*.safetensors")):
            runner_of(llm).get_model().load_weights(iter(load_file(file).items()))
    llm.reset_prefix_cache()
    before = stale(llm)
    if before is not None and before.startswith("0 of"):
        raise AssertionError(f"the check of copies sees nothing: {before} are stale after a load past vLLM")
    return f"before the next drafts {before}" if before else None


_scratch: set[str] = set()
"""Tensors of copies that are no weights: they differed when the engine had just started."""


def stale(llm: Any, at_start: bool = False) -> str | None:
    """How many tensors of the copies are not what would be made of the target's weights of now; None without copies."""
    import torch

    drafter = drafter_of(llm)
    if not hasattr(drafter, "renew"):
        return None
    trunk, by_name = drafter.model, drafter.vllm_config.compilation_config.static_forward_context
    known, compared, different = dict(by_name), 0, set()
    with torch.inference_mode():
        for place, layer in enumerate(trunk.drafting_layers):
            made = dict(trunk.remade_layer(place).named_modules())
            by_name.update(known)
            for path, part in layer.named_modules():
                for kind in ("_parameters", "_buffers"):
                    for key, tensor in getattr(made[path], kind).items():
                        mine = getattr(part, kind).get(key)
                        if tensor is None or mine is None or mine.data_ptr() == tensor.data_ptr():
                            continue
                        compared += 1
                        if not torch.equal(mine, tensor):
                            different.add(f"{place} {path} {key}")
        fused = getattr(drafter, "fused_step", None)  # where it is all that has copies of the layers
        if fused is not None:
            before = fused.copies.clone()
            fused.fill()
            compared += 1
            if not torch.equal(fused.copies, before):
                different.add("copies of all layers")
            fused.copies.copy_(before)
    if at_start:
        _scratch.update(different)
    return f"{len(different - _scratch)} of {compared - len(_scratch)} tensors of copies" if compared else None


def other_weights(model: Path, folder: Path) -> None:
    """The model with each row of its layers' matrices scaled by another factor: as far from it as some training."""
    import torch
    from safetensors.torch import load_file, save_file

    draw = torch.Generator().manual_seed(0)
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder / file.name)
            continue
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.ndim == 2 and "layers." in name:
                rows = 1 + 0.1 * torch.randn(len(tensor), 1, generator=draw)
                tensors[name] = (tensor * rows.to(tensor.dtype)).contiguous()
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
    (folder / "complete").touch()


# ---- an engine, in a process of its own ----------------------------------------------------------------------------


def start(name: str, model: str, drafting: bool) -> Any:
    """An engine in this process."""
    import torch
    from vllm import LLM

    settings, on_gpu = dict(ENGINES[name]), torch.cuda.is_available()
    if not on_gpu:
        settings |= {"kv_cache_memory_bytes": 1 << 28, "max_model_len": 512, "max_num_batched_tokens": 512}
    if not (drafting and on_gpu):  # vLLM's memory pool that can be given away may be had without drafts
        settings.pop("enable_sleep_mode", None)
    return LLM(
        model=model,
        max_num_seqs=16,
        max_logprobs=200,
        enable_prefix_caching=True,
        disable_log_stats=False,
        **(ON_GPU if on_gpu else ON_CPU),
        **settings,
        **({"speculative_config": {"method": "selfspec"}} if drafting else {}),
    )


def asker(llm: Any, params: dict[str, Any]) -> Ask:
    from vllm import SamplingParams

    sampling = SamplingParams(**({"temperature": 0, "ignore_eos": True, "detokenize": False} | params))

    def ask(prompts: Prompts) -> list[Any]:
        return llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)

    return ask


def reference(name: str, model: str, folder: Path, paths: Mapping[str, str], few: bool) -> None:
    """What the plain engine answers, a file a case."""
    llm = start(name, model, drafting=False)
    for case in cases(name, llm, paths, few):
        if case.same_as is not None:
            continue
        write(folder / f"{name} {case.name}.json", answered(llm, case))
        if case.name == "logit_bias":
            exact = exact_distribution(llm, few)
            control = p_values(first_tokens(llm, few, "plain"), exact)
            write(folder / f"{name} min_p.json", exact | {"plain": control["with"]})


def answered(llm: Any, case: Case) -> list[dict[str, Any]] | dict[str, str]:
    """Tokens and log-probabilities of a plain engine's answers, or what went wrong."""
    try:
        case.before(llm)
        outputs = case.run(asker(llm, case.params | {"logprobs": TOP}))
    except Exception as error:  # the next case is worth running all the same
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return [
        {
            "tokens": list(one.outputs[0].token_ids),
            "scores": [{str(key): value.logprob for key, value in at.items()} for at in one.outputs[0].logprobs],
        }
        for one in outputs
    ]


def drafted(name: str, model: str, folder: Path, paths: Mapping[str, str], few: bool) -> None:
    """Compare the drafting engine's answers, and print a row a case and arm."""
    import torch

    began = time.perf_counter()
    llm = start(name, model, drafting=True)
    settings = drafter_of(llm).settings
    row(
        {
            "engine": name,
            "case": "start",
            "ok": True,
            "runner": type(runner_of(llm)).__module__,
            "draft_weights": settings.draft_weights,
            "layer": settings.layer,
            "method": str(llm.llm_engine.vllm_config.speculative_config.draft_sample_method),
            "rope": str(getattr(llm.llm_engine.vllm_config.model_config.hf_text_config, "rope_parameters", None)),
            "kv_cache_dtype": str(llm.llm_engine.vllm_config.cache_config.cache_dtype),
            "chat_template": llm.get_tokenizer().chat_template is not None,
            "copies": stale(llm, at_start=True),
            "scratch": len(_scratch),
            "with_others_seconds": round(time.perf_counter() - began, 1),
            "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT"),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        }
    )
    for case in cases(name, llm, paths, few):
        for arm in case.arms:
            attempt(name, case.name, arm, lambda case=case, arm=arm: judge(name, llm, case, arm, folder))
        for arm in case.arms if case.name == "logit_bias" else ():
            attempt(name, "min_p", arm, lambda arm=arm: judge_distribution(name, llm, arm, folder, few))


_worth: dict[str, Any] = {}
"""What ends drafts of the V1 runner that do not pay, while an arm goes without."""


def set_arm(llm: Any, arm: str) -> None:
    """The rule, or a fixed draft length, which also drafts what does not pay."""
    llm.collective_rpc("early_exit_set_gate", args=("auto" if arm == "rule" else "none", None))
    table = None if arm == "rule" else f"1:{arm.removeprefix('k=')}"
    llm.collective_rpc("early_exit_set_length_table", args=(table,))
    drafter = drafter_of(llm)
    _worth.setdefault("V1", getattr(drafter, "worth", None))
    if hasattr(drafter, "set_choice"):  # V2: a step is worth no tokens, whatever the rule says
        drafter.__dict__.pop("set_choice", None)
        if arm != "rule":
            drafter.set_choice, drafter.state.step_value = (lambda _: None), 0.0
    else:
        drafter.worth = _worth["V1"] if arm == "rule" else None


def counted(llm: Any) -> dict[str, int]:
    """Counted since the engine started."""
    names = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "prefix_cache_hits")
    values = {metric.name: metric for metric in llm.get_metrics()}
    found = {name.removeprefix("spec_decode_num_"): int(values[f"vllm:{name}"].value) for name in names}
    own = llm.collective_rpc("early_exit_counters")[0]
    return found | {"own_drafts": int(own["drafted"]), "copied_accepted": int(own["free_accepted"])}


def drafts_were_made(counts: Mapping[str, int], arm: str) -> bool:
    """Drafts were made and accepted; with a fixed length, those of the model's own copies among them."""
    own = arm == "rule" or (counts["own_drafts"] > 0 and counts["accepted_tokens"] > counts["copied_accepted"])
    return own and counts["draft_tokens"] > 0 and counts["accepted_tokens"] > 0


def since(llm: Any, before: Mapping[str, int]) -> dict[str, int]:
    return {key: value - before[key] for key, value in counted(llm).items()}


def judge(name: str, llm: Any, case: Case, arm: str, folder: Path) -> None:
    """Ask under an arm, compare with the plain engine, and print the row."""
    set_arm(llm, arm)
    copies = (case.drafting_before or case.before)(llm)
    before = counted(llm)
    outputs = case.run(asker(llm, case.params))
    counts = since(llm, before)
    after = stale(llm) if copies is not None else None
    wanted = read(folder / f"{name} {case.same_as or case.name}.json")
    got = [list(one.outputs[0].token_ids) for one in outputs]
    gaps = [gap(tokens, one) for tokens, one in zip(got, wanted, strict=True)]
    differ = [one for one in gaps if one is not None]
    strict = name in INVARIANT and not (name == "fp8" and arm == "rule")
    same = not differ if strict else all(one <= NEAR for one in differ)
    acted = None
    if case.acted_on is not None:
        plain = read(folder / f"{name} {case.acted_on}.json")
        acted = sum(one["tokens"] != other["tokens"] for one, other in zip(wanted, plain, strict=True))
    made = drafts_were_made(counts, arm)
    hits = counts["prefix_cache_hits"] > 0 or "turns" not in case.name
    fresh = after is None or after.startswith("0 of")
    row(
        {
            "engine": name,
            "case": case.name,
            "arm": arm,
            "ok": made and same and hits and fresh and acted != 0,
            **counts,
            "compared": len(got),
            "tokens": sum(map(len, got)),
            "differ": len(differ),
            "gaps": [round(one, 4) for one in differ],
            "judged": "no output may differ" if strict else f"may part where two tokens are within {NEAR}",
            "others_than_before": acted,
            "copies_first": copies,
            "copies_after": after,
        }
    )


def gap(got: list[int], plain: Mapping[str, Any]) -> float | None:
    """How much likelier the plain engine found its own token than the one that came instead, at the first place where
    outputs part; None for the same output, infinity for a token that was not among its best."""
    want = plain["tokens"]
    at = next((at for at, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return None if len(got) == len(want) else math.inf
    scores = plain["scores"][at]
    return scores[str(want[at])] - scores.get(str(got[at]), -math.inf)


# ---- min_p: the distribution of the first tokens -------------------------------------------------------------------


def sampled_prompt(llm: Any) -> list[int]:
    """A text that many tokens may follow."""
    return list(llm.get_tokenizer().encode("Names drawn at random: Alice, Omar, Yuki, Pedro, Ingrid, Tariq,"))


def exact_distribution(llm: Any, few: bool) -> dict[str, Any]:
    """Of each of the first PLACES tokens, its probabilities with min_p and without, whatever stands before it, by the
    plain engine's log-probabilities: exact, because min_p leaves few tokens."""
    start_of, texts = sampled_prompt(llm), {(): 1.0}
    found: dict[str, Any] = {"with": [], "without": []}
    for _ in range(2 if few else PLACES):
        if len(texts) > 1000:
            break
        ask = asker(llm, {"max_tokens": 1, "logprobs": 200})
        answers = ask([start_of + list(text) for text in texts])
        places: dict[str, dict[str, float]] = {"with": {}, "without": {}}
        longer: dict[tuple[int, ...], float] = {}
        for (text, weight), answer in zip(texts.items(), answers, strict=True):
            scores = {key: one.logprob / TEMPERATURE for key, one in answer.outputs[0].logprobs[0].items()}
            best = max(scores.values())
            kept = {key: score for key, score in scores.items() if score >= best + math.log(MIN_P)}
            assert len(kept) < len(scores), "more tokens are left than log-probabilities were asked for"
            for kind, left in (("with", kept), ("without", scores)):
                total = sum(math.exp(score - best) for score in left.values())
                for key, score in left.items():
                    share = weight * math.exp(score - best) / total
                    places[kind][str(key)] = places[kind].get(str(key), 0.0) + share
                    if kind == "with":
                        longer[*text, key] = share
        for kind, place in places.items():
            found[kind].append(place)
        texts = longer
    return found | {"texts": {words(text): share for text, share in texts.items()}}


def words(text: Iterable[Any]) -> str:
    """Token ids as a key of JSON."""
    return " ".join(map(str, text))


def first_tokens(llm: Any, few: bool, who: str) -> list[Any]:
    """The first tokens of many seeded requests with min_p. who: draws the seeds, so that no two looks share their
    noise: with the same seeds the two arms gave nearly the same tokens, and one odd sample looked like two."""
    from vllm import SamplingParams

    most = PLACES + 2  # four may be drafted after the first
    common = {"temperature": TEMPERATURE, "min_p": MIN_P, "max_tokens": most, "ignore_eos": True, "detokenize": False}
    draw = random.Random(f"min_p {who}")
    params = [SamplingParams(seed=draw.getrandbits(48), **common) for _ in range(64 if few else 4096)]
    prompts = [{"prompt_token_ids": sampled_prompt(llm)}] * len(params)
    return [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]


def p_values(texts: list[Any], exact: Mapping[str, Any]) -> dict[str, list[float]]:
    """By `p_value`: of each place with min_p and at last of all places together, which shows what the places alone do
    not; and of each place without min_p, which has to be told apart."""
    found = {
        kind: [p_value([text[place] for text in texts], of) for place, of in enumerate(exact[kind])]
        for kind in ("with", "without")
    }
    found["with"].append(p_value([words(text[: len(exact["with"])]) for text in texts], exact["texts"]))
    return found


def judge_distribution(name: str, llm: Any, arm: str, folder: Path, few: bool) -> None:
    """Many seeded requests with min_p, their first tokens compared with the exact distribution."""
    set_arm(llm, arm)
    exact = read(folder / f"{name} min_p.json")
    before = counted(llm)
    texts = first_tokens(llm, few, arm)
    counts = since(llm, before)
    found = p_values(texts, exact)
    outside = sum(str(text[place]) not in of for text in texts for place, of in enumerate(exact["with"]))
    made = drafts_were_made(counts, arm)
    # The first token is the target's own; the others were drafted. A right p-value of 1 would say nothing.
    rejected = min(found["with"][1:]) < 1 and min(found["without"][1:]) < ACCEPT
    control = min(exact["plain"]) > ACCEPT  # or `exact` is not what the plain engine draws from, and tells nothing
    row(
        {
            "engine": name,
            "case": "min_p",
            "arm": arm,
            "ok": made and control and rejected and not outside and min(found["with"]) > ACCEPT,
            **counts,
            "requests": len(texts),
            "p_values": found["with"],
            "p_values_of_the_plain_engine": exact["plain"],
            "p_values_of_the_distribution_without_min_p": found["without"],
            "tokens_that_min_p_forbids": outside,
            "tokens_that_it_allows": [len(of) for of in exact["with"]],
            "judged": f"chi-square of each place's tokens and of the whole text, plain's too: above {ACCEPT}",
        }
    )


def p_value(tokens: list[Any], exact: Mapping[str, float]) -> float:
    """Of the hypothesis that the tokens were drawn from `exact`: chi-square over the cells that expect five or more,
    the others as one."""
    import torch

    counts: dict[str, int] = {}
    for token in tokens:
        counts[str(token)] = counts.get(str(token), 0) + 1
    cells = [key for key, share in exact.items() if share * len(tokens) >= 5]
    pairs = [(counts.get(key, 0), exact[key] * len(tokens)) for key in cells]
    rest = len(tokens) - sum(have for have, _ in pairs), len(tokens) - sum(expect for _, expect in pairs)
    if len(pairs) + (rest[1] >= 5) < 2:
        return 1.0  # one token is nearly certain, which tells nothing
    if rest[1] < 5:  # too few for a cell of their own
        have, expect = pairs.pop()
        rest = rest[0] + have, rest[1] + expect
    pairs.append(rest)
    square = sum((have - expect) ** 2 / expect for have, expect in pairs)
    half = torch.tensor([(len(pairs) - 1) / 2, square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


# ---- processes and rows --------------------------------------------------------------------------------------------


def row(found: dict[str, Any]) -> None:
    print("ROW " + json.dumps(found), flush=True)


def attempt(name: str, case: str, arm: str, judged: Callable[[], None]) -> None:
    """A case under an arm; where it fails its row says so, because the next one is worth running all the same."""
    try:
        judged()
    except Exception as error:
        traceback.print_exc()
        words = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        frames = traceback.extract_tb(error.__traceback__)[-6:]
        where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]
        row({"engine": name, "case": case, "arm": arm, "ok": False, "error": words, "where": where})


def write(path: Path, what: Any) -> None:
    """As a whole or not at all: another process reads it, and this one may be ended at any moment."""
    atomic_write(path, json.dumps(what, indent=1))


def wait_for(path: Path, seconds: float = 270) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until or (path.parent / f"{path.name.split()[0]} plain has ended").exists():
            raise TimeoutError(f"{path.name} is missing: the plain engine has not answered")
        time.sleep(0.2)


def read(path: Path) -> Any:
    wait_for(path)
    found = json.loads(path.read_text(encoding="utf-8"))
    if "error" in found:
        raise RuntimeError(f"the plain engine: {found['error']}")
    return found


def follow(
    name: str, process: subprocess.Popen[str], folder: Path, rows: list[dict[str, Any]], save: Callable[[], None]
) -> None:
    """Take in a process's rows as it prints them."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ROW "):
            found = json.loads(line.removeprefix("ROW "))
            rows.append(found)
            save()
            print("ok  " if found["ok"] else "FAIL", json.dumps(found)[:400], flush=True)
    if process.wait():
        (folder / f"{name} has ended").touch()
        log = (folder / f"{name.replace(' ', '_')}.log").read_text(encoding="utf-8", errors="replace")
        said = [line[-300:] for line in log.splitlines() if "Error" in line][-4:]
        error = f"ended with {process.returncode}"
        rows.append({"engine": name, "case": "the whole process", "ok": False, "error": error, "said": said})
        save()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gemma", type=Path, help="folder of Gemma 3 270M")
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--only", default=",".join(ENGINES), help="engines, of " + ", ".join(ENGINES))
    parser.add_argument("--seconds", type=float, default=285, help="what still runs after this is ended")
    parser.add_argument("--few", action="store_true", help="a short try, as on a CPU")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = args.out.parent / (args.out.stem + "_files")
    if args.worker:
        name, role = args.worker
        model = {"gemma": args.gemma, "smollm2": args.smollm2}.get(name, args.model)
        paths = {"model": str(model), "other": str(folder / "other")}
        {"plain": reference, "drafting": drafted}[role](name, str(model), folder, paths, args.few)
        return 0
    return run(args, folder)


def run(args: argparse.Namespace, folder: Path) -> int:
    """All engines at once; rows into OUT.json."""
    import torch

    began = time.monotonic()
    models = {"gemma": args.gemma, "smollm2": args.smollm2}
    wanted = [name for name in args.only.split(",") if models.get(name, args.model) is not None]
    (folder / "other").mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    lock = threading.Lock()

    def save() -> None:
        with lock:
            asked = {"model": args.model.name, "engines": wanted, "seconds": round(time.monotonic() - began, 1)}
            write(args.out, asked | {"ok": bool(rows) and all(one["ok"] for one in rows), "rows": rows})

    processes, threads = [], []
    for name in wanted:
        for role in ("plain", "drafting"):
            environment = os.environ | {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "OMP_NUM_THREADS": "2",
                "VLLM_LOGGING_STREAM": "ext://sys.stderr",
                "TRITON_CACHE_DIR": tempfile.gettempdir() + "/selfspec-triton",
                "VLLM_BATCH_INVARIANT": "1" if name in INVARIANT and torch.cuda.is_available() else "0",
            }
            log = (folder / f"{name}_{role}.log").open("w")
            command = [sys.executable, __file__, *sys.argv[1:], "--worker", name, role]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
            thread = threading.Thread(target=follow, args=(f"{name} {role}", process, folder, rows, save), daemon=True)
            thread.start()
            processes.append(process)
            threads.append(thread)
    if "main" in wanted:
        other_weights(args.model, folder / "other")
    for thread in threads:
        thread.join(max(began + args.seconds - time.monotonic(), 0.1))
    for process in processes:
        if process.poll() is None:
            process.kill()
    for thread in threads:
        thread.join(5)
    save()
    print(f"{sum(one['ok'] for one in rows)} of {len(rows)} rows ok, {time.monotonic() - began:.0f} s", flush=True)
    return 0 if rows and all(one["ok"] for one in rows) else 1


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)  # vLLM's shutdown may wait for minutes
