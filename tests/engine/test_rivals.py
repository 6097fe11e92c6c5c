"""vLLM's own drafters as arms beside early exit, in one sweep on real engines: drafts are made, the output stays."""

from typing import Any

import pytest

from selfspec_cli.config.schema import EngineConfig, Method, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.engine.live import open_engine
from selfspec_cli.record import tables
from selfspec_cli.stages import measure, sweep

K, PROMPTS = 3, 4
NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.nightly
def test_ngram_and_a_draft_model_beside_early_exit_in_one_sweep(model_dir, tmp_path):
    # Of 32 tokens, so that what is looked up often stood there before.
    path = str(model_dir("llama_small_vocab"))

    def arm(**more: Any) -> RunConfig:
        return RunConfig(
            model=ModelConfig(name="tiny", path=path),
            engine=EngineConfig(
                device="cpu", enforce_eager=True, kv_cache_gib=0.0625, extra={"skip_tokenizer_init": True}
            ),
            workload=WorkloadConfig(input_len=16, output_len=64, num_prompts=PROMPTS, batch=2, prompts="random"),
            results_dir=str(tmp_path),
            repeats=3,
            perplexity_tokens=0,
            k=K,
            **more,
        )

    arms = [arm(layer=3)]
    arms += [
        arm(method=Method.vllm, speculative=spec)
        for spec in (NGRAM, {"method": "draft_model", "model": path}, NGRAM | {"prompt_lookup_min": 9})
    ]
    result = sweep.run(arms, open_engine=open_engine, bench=measure.bench)
    _, early, ngram, draft, wrong = result.rows
    for row in (early, ngram):
        assert row.accept_rate is not None and 0 < row.accept_rate < 1
    assert draft.accept_rate is not None and draft.accept_rate > 0.9, "it is the model itself that drafts"
    for row in (early, ngram, draft):
        assert (row.identical, row.outputs) == (PROMPTS, PROMPTS)
    assert (ngram.arm, ngram.speculative, ngram.E) == ("vllm", "ngram prompt_lookup_max=3 prompt_lookup_min=1", None)
    counted = tables.accept_row(result.points[2])
    assert counted is not None and counted.accepted_at is not None and counted.accepted is not None
    at = [int(count) for count in counted.accepted_at.split()]
    assert len(at) == K and sum(at) == counted.accepted and at[0] > 0, "by position, from vLLM's own counters"
    assert "draft" in result.points[3].digests
    assert "prompt_lookup_min" in wrong.status and result.exit_code == 2, "bad input, which vLLM found"
