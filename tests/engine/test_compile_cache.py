"""An engine with early exit runs what a plain engine compiled, and the next one what that compiled of its draft."""

import json
import os
import subprocess
import sys

from tests.engine.models import save_tiny

# vLLM compiles by its own backend on CUDA alone. What that backend needs of a GPU here is one pass over the graph, and
# fusions for kernels that the CPU build lacks.
ENGINES = """
import json
import sys

from vllm.config import CompilationMode
from vllm.compilation.counter import compilation_counter
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.platforms.cpu import CpuPlatform

checked = CpuPlatform.check_and_update_config

def as_on_cuda(config):
    mode = config.compilation_config.mode
    checked(config)
    config.compilation_config.mode = mode

CpuPlatform.check_and_update_config = staticmethod(as_on_cuda)
FixFunctionalizationPass.__call__ = lambda self, graph: None

if __name__ == "__main__":
    from functools import partial

    import torch
    from harness import greedy, layer_skip, live, tokens
    from selfspec_cli.vllm_plugin.trunk import first_layers
    from selfspec_cli.vllm_plugin.v1 import proposer

    chosen = {"mode": CompilationMode.VLLM_COMPILE, "backend": "inductor", "compile_sizes": [],
              "pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False}}
    for k, compiled in ((0, True), (3, True), (5, True), (5, False)):
        proposer.first_layers = partial(first_layers, compiled=compiled)
        spec = layer_skip(2, k) if k else None
        with live(sys.argv[1], spec, enforce_eager=False, compilation_config=dict(chosen)) as engine:
            outputs = tokens(engine.generate([[3, 4, 5, 6]], greedy(20)))
            print("FOUND", json.dumps({"tokens": outputs, "accepted": engine.counts().accepted,
                                       "compiled": compilation_counter.num_aot_compiles,
                                       "loaded": compilation_counter.num_aot_artifacts_loaded}), flush=True)
        torch._dynamo.reset()
"""


def test_what_a_plain_engine_compiled_is_loaded_and_a_draft_is_compiled_once_for_every_length(tmp_path):
    model = save_tiny("llama", tmp_path / "llama", num_hidden_layers=3)
    script = tmp_path / "engines.py"
    script.write_text(ENGINES)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], *sys.path]),
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_AOT_COMPILE": "1",
    }
    command = [sys.executable, str(script), str(model)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
    found = [json.loads(line.removeprefix("FOUND")) for line in run.stdout.splitlines() if line.startswith("FOUND")]
    assert len(found) == 4, (run.stdout + run.stderr)[-3000:]
    plain, first, second, uncompiled = found
    # Of the target and its draft, in this process so far: how many were compiled, and how many were loaded.
    assert (plain["compiled"], plain["loaded"]) == (1, 0)
    assert (first["compiled"], first["loaded"]) == (2, 1)
    assert (second["compiled"], second["loaded"]) == (2, 3)
    assert (uncompiled["compiled"], uncompiled["loaded"]) == (2, 4)  # the target's alone
    assert first["accepted"] and second["accepted"] and uncompiled["accepted"]
    assert first["tokens"] == second["tokens"] == uncompiled["tokens"] == plain["tokens"]
