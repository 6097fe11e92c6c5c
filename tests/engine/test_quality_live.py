"""`selfspec ppl` and `selfspec eval` over real engines of the reference model: scores are those of transformers, drafts
are accepted, and what is generated is the baseline's."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.keys import baseline_of
from selfspec_cli.config.paths import reference_model_dir
from selfspec_cli.engine.live import open_engine
from selfspec_cli.record import quality
from selfspec_cli.stages import ppl, profile
from selfspec_cli.texts import library

WORDS = ["layer=3", "k=4", "gate=maxp", "tau=0.3", "engine.enforce_eager=true", "engine.kv_cache_gib=0.1"]
REQUEST = ppl.Request(documents=3, document_tokens=80, window=32, stride=16, prompts=4, prompt_tokens=24, length=16)


def windows_by_transformers(ids: list[int]) -> float:
    """Negative log-likelihood (nats) of all but the first token, in windows of 32 that move by 16."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(reference_model_dir(), dtype=torch.float32).eval()
    total, scored = 0.0, 1
    for end in range(32, len(ids) + 1, 16):
        with torch.no_grad():
            logprobs = model(torch.tensor([ids[end - 32 : end]])).logits[0].log_softmax(-1)
        total -= sum(float(logprobs[at - end + 31, ids[at]]) for at in range(scored, end))
        scored = end
    assert scored == len(ids)
    return total


@pytest.fixture(scope="module")
def cfgs(tmp_path_factory):
    return compose_runs(None, [*WORDS, f"results_dir={tmp_path_factory.mktemp('results')}"])


def test_perplexities(cfgs):
    skip = replace(cfgs[0], method="skip", layer=12)
    found = ppl.run([skip, *cfgs], REQUEST, open_engine=open_engine)
    assert found.failed == [] and found.warnings == []
    findings = {(one.kind, one.arm["arm"]): one for one in found.findings}

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reference_model_dir())
    name, text = library.held_out_text()[0]
    ids = library.leading_tokens(lambda part: tokenizer.encode(part, add_special_tokens=False), text, 80)
    plain = findings[quality.TEXT, "baseline"]
    assert (plain.found["documents"][0], plain.scores().tokens) == (name, [79] * 3)
    assert plain.scores().nats[0] == pytest.approx(windows_by_transformers(ids), abs=1e-2)
    lost = findings[quality.TEXT, "skip"]
    assert lost.scores().perplexity > 1.02 * lost.scores(baseline=True).perplexity

    arm = findings[quality.GENERATED, "layer_skip"].found
    for name in ("greedy", "sampled"):
        assert 0 < arm[name]["accepted"] < arm[name]["drafted"]
    assert arm["greedy"]["identical"] == 4
    assert arm["sampled"]["identical"] < 4  # other random numbers, so that it was another text that was scored
    assert findings[quality.GENERATED, "skip"].found["greedy"]["identical"] < 4


def test_scores(cfgs):
    pytest.importorskip("lm_eval")
    from selfspec_cli.stages import evaluate

    tasks = evaluate.load(["stdlib_choice", "stdlib_line"])
    found = evaluate.run(cfgs, tasks, limit=8, fewshot=0, open_engine=open_engine)
    assert found.failed == [] and found.warnings == []
    base, arm = found.findings
    assert arm.found["accepted"] > 0
    values = [[(one["task"], one["value"]) for one in finding.found["scores"]] for finding in (base, arm)]
    assert values[0] == values[1]
    assert [score["same"] for score in arm.found["scores"]] == [8, 8, 8]
    assert "(drafted)" in quality.read(cfgs[0].results_dir).columns(arm.arm_key, "")["scores"]


# ---- A live engine under the profiler: where the time goes adds up, and drafting and verifying are told apart


def test_the_parts_of_a_run_add_up_to_its_wall_time(model_dir, tmp_path, report):
    """Of the baseline and of early exit, in this process (which is where an engine on the CPU runs)."""
    words = [f"model={model_dir('llama')}", "model.max_model_len=256", "layer=3", "k=3", f"results_dir={tmp_path}"]
    words += ["engine.enforce_eager=true", "engine.kv_cache_gib=0.1", "engine.extra.skip_tokenizer_init=true"]
    words += ["workload.prompts=random", "workload.num_prompts=2", "workload.batch=2", "workload.output_len=32"]
    (drafting,), found = compose_runs(None, words), {}
    for cfg in (baseline_of(drafting), drafting):
        made, path = profile.run(cfg, open_engine=open_engine, tokens=24)
        assert sum(made.seconds.values()) == pytest.approx(made.wall)
        assert Path(path).is_file() and (Path(path).parent / made.trace).stat().st_size > 1000
        found[str(cfg.method)] = made
        report(
            f"{cfg.method}: " + json.dumps({name: round(spent / made.wall, 3) for name, spent in made.seconds.items()})
        )
    plain, early = found["baseline"], found["layer_skip"]
    assert plain.rounds == 24 and plain.tokens == early.tokens == 48
    assert not {"trunk", "head", "gate", "draft"} & set(plain.seconds)
    assert {"trunk", "head", "gate", "draft", "verify", "sampler", "scheduler", "detokenise"} <= set(early.seconds)
    assert plain.kernels[0]["seconds"] > 0 and early.kernels[0]["calls"] > 24 / 4
    assert len(quality.newest_profiles(tmp_path)) == 2
