"""`selfspec verify` on a GPU, on a small model of each kind of architecture: a line a shape, all verdicts in a file.

    python tests/gpu/verify_shapes.py [--only NAME,NAME] [--batch-invariant] [--plant all] [--out FILE] [KEY=VALUE ...]

Random weights whose early exits are sometimes right (tests/engine/models.py), bf16, V2 model runner; the engines live
in processes of their own, one after the other. Exit code 1 if a shape has another verdict than it may have: gpt-oss,
which plain vLLM does not repeat in batch-invariant mode, may be "not shown".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from models import ARCHITECTURES, LAYERS, Tiny, save_tiny, save_tokenizer

# FlashAttention 3 is batch-invariant at head size 128; at 64 it is not invariant to the query length.
DENSE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
LATENT = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
}
ARCHITECTURES["gpt_oss"] = Tiny("GptOssConfig", OSS)
SHAPES: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "llama_small_vocab": DENSE,  # compared with the exact distribution too
    "qwen3_moe": {name: value for name, value in DENSE.items() if name != "intermediate_size"},
    "gemma3": DENSE | {"query_pre_attn_scalar": 128},
    "llama4": DENSE,
    "deepseek_v2": LATENT,
    "gpt_oss": DENSE | {"intermediate_size": 256, "num_attention_heads": 8, "head_dim": 64},
}
MAY_BE = {"gpt_oss": ("lossless", "near-ties only", "not shown")}
PASSING = ("lossless", "near-ties only")
LIMIT = 560  # seconds for one shape


def words(name: str, folder: Path, results: Path, options: argparse.Namespace) -> list[str]:
    """The command line of one shape."""
    fixed = [f"model={folder}", f"model.name={name}", "model.dtype=bfloat16", "engine=h100", "k=4"]
    fixed += [f"layer={LAYERS // 2}", "engine.kv_cache_gib=1", "engine.max_num_seqs=64", f"results_dir={results}"]
    fixed += ["engine.extra.skip_tokenizer_init=true"] if name == "llama_small_vocab" else []
    fixed += ["--batch-invariant"] if options.batch_invariant else []
    fixed += ["--plant", options.plant] if options.plant else []
    return [sys.executable, "-m", "selfspec_cli", "verify", *fixed, *options.words, "--json"]


def verdict(name: str, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The document of one shape; with an error for one that could not be run."""
    folder = save_tiny(name, root / name, **SHAPES[name])
    if name != "llama_small_vocab":
        save_tokenizer(folder)
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": paths}
    try:
        done = subprocess.run(words(name, folder, options.results, options), capture_output=True, text=True,
                              timeout=LIMIT, env=environment, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"verdict": None, "error": f"not done after {LIMIT} s"}
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        return {"verdict": None, "error": done.stderr[-3000:]}


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--only", default="")
    options.add_argument("--batch-invariant", action="store_true")
    options.add_argument("--plant", default="")
    options.add_argument("--results", type=Path, default=Path("results/verify_shapes"))
    options.add_argument("--out", type=Path, default=Path("verify_shapes.json"))
    options.add_argument("words", nargs="*")
    chosen = options.parse_args()
    found: dict[str, dict[str, Any]] = {}
    good = True
    with tempfile.TemporaryDirectory(prefix="selfspec-") as root:
        for name in SHAPES:
            if chosen.only and name not in chosen.only.split(","):
                continue
            start = time.perf_counter()
            found[name] = verdict(name, Path(root), chosen)
            one = found[name]
            good &= one.get("verdict") in MAY_BE.get(name, PASSING)
            counts = f"{one.get('accepted')} of {one.get('drafted')} accepted"
            why = one.get("reason") or one.get("error")
            print(
                f"{one.get('verdict')!s:<15} {name:<18} {time.perf_counter() - start:.0f} s, {counts}: {why}",
                flush=True,
            )
            for kind, fault in one.get("faults", {}).items():
                print(f"    {'named' if fault['named'] else 'MISSED'} {kind}: {fault['verdict']} {fault['suspect']}")
            chosen.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
