"""A live engine under the profiler: where the time goes adds up, and drafting and verifying are told apart."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from selfspec_cli.config.schema import EngineConfig, Method, ModelConfig, RunConfig, WorkloadConfig
from selfspec_cli.engine.live import open_engine
from selfspec_cli.record import profiles
from selfspec_cli.stages import profile

pytestmark = pytest.mark.engine


def test_the_parts_of_a_run_add_up_to_its_wall_time(model_dir, tmp_path, report):
    """Of the baseline and of early exit, in this process (which is where an engine on the CPU runs)."""
    drafting = RunConfig(
        model=ModelConfig(path=str(model_dir("llama")), max_model_len=256),
        engine=replace(EngineConfig(), enforce_eager=True, kv_cache_gib=0.1, extra={"skip_tokenizer_init": True}),
        workload=WorkloadConfig(name="short", prompts="random", num_prompts=2, batch=2, output_len=32),
        method=Method.layer_skip,
        layer=3,
        k=3,
        results_dir=str(tmp_path),
    )
    found = {}
    for cfg in (replace(drafting, method=Method.baseline), drafting):
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
    assert len(profiles.newest(tmp_path)) == 2
