"""An engine with early exit runs what a plain engine compiled, and the next one what that compiled of its draft."""

from __future__ import annotations

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
    from vllm import LLM, SamplingParams

    spec = json.loads(sys.argv[2])
    chosen = {"mode": CompilationMode.VLLM_COMPILE, "backend": "inductor", "compile_sizes": [],
              "pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False}}
    llm = LLM(model=sys.argv[1], skip_tokenizer_init=True, dtype="float32", block_size=32, max_num_seqs=2,
              max_model_len=64, max_num_batched_tokens=64, kv_cache_memory_bytes=2**26, speculative_config=spec,
              compilation_config=chosen)
    greedy = SamplingParams(temperature=0, max_tokens=20, detokenize=False, ignore_eos=True)
    (found,) = llm.generate([{"prompt_token_ids": [3, 4, 5, 6]}], greedy, use_tqdm=False)
    accepted = llm.collective_rpc("early_exit_counters")[0]["accepted"] if spec else None
    print("FOUND", json.dumps({"tokens": list(found.outputs[0].token_ids), "accepted": accepted,
                               "compiled": compilation_counter.num_aot_compiles,
                               "loaded": compilation_counter.num_aot_artifacts_loaded}), flush=True)
"""


def test_what_a_plain_engine_compiled_is_loaded_and_a_draft_is_compiled_once_for_every_length(tmp_path):
    model = save_tiny("llama", tmp_path / "llama")
    script = tmp_path / "engine.py"
    script.write_text(ENGINES)
    env = os.environ | {
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_AOT_COMPILE": "1",
    }  # fmt: skip

    def engine(spec):
        run = subprocess.run([sys.executable, str(script), str(model), json.dumps(spec)], env=env, capture_output=True,
                             text=True, check=False, timeout=400)  # fmt: skip
        lines = [line for line in run.stdout.splitlines() if line.startswith("FOUND")]
        assert lines, (run.stdout + run.stderr)[-3000:]
        return json.loads(lines[0].removeprefix("FOUND"))

    plain = engine(None)
    assert (plain["compiled"], plain["loaded"]) == (1, 0)
    spec = {"method": "layer_skip", "layer_skip": 4}
    first, second = (engine({**spec, "num_speculative_tokens": k}) for k in (3, 5))
    assert (first["compiled"], first["loaded"]) == (1, 1)  # the draft; the target
    assert (second["compiled"], second["loaded"]) == (0, 2)
    assert first["accepted"] and second["accepted"]
    assert first["tokens"] == second["tokens"] == plain["tokens"]
