"""`selfspec verify` on a GPU, on a small model of each kind of architecture: a line a shape, all verdicts in a file.

    python tests/gpu/verify_shapes.py [--only NAME,NAME] [--batch-invariant] [--plant all] [--out FILE] [KEY=VALUE ...]

Random weights whose early exits are sometimes right (tests/engine/models.py), bf16, V2 model runner, CUDA graphs
without torch.compile; the engines live in processes of their own, one after the other. Exit code 1 if a shape has
another verdict than it may have: plain vLLM does not repeat its own outputs of gpt-oss in batch-invariant mode.

Shapes of this size take a minute or two each. `--only llama_8b` is Llama 3's 8B shape: 16 GB of such weights, made on
the GPU and written to the temporary folder first."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

import torch
from models import ARCHITECTURES, LAYERS, MAX_LEN, VOCAB, Tiny, save_tiny, save_tokenizer
from shapes import DENSE, shape

OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
}
ARCHITECTURES["gpt_oss"] = Tiny("GptOssConfig", OSS)
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
ARCHITECTURES["llama_8b"] = Tiny("LlamaConfig", LLAMA_8B)
SHAPES: dict[str, dict[str, Any]] = {
    "llama": shape("llama"),
    "llama_small_vocab": shape("llama_small_vocab"),  # compared with the exact distribution too
    "qwen3_moe": shape("qwen3_moe"),
    # No sequence here is longer than the window: with one that cuts, FlashAttention 3 is not batch-invariant.
    "gemma3": DENSE | {"query_pre_attn_scalar": 128, "sliding_window": MAX_LEN},
    "llama4": shape("llama4"),
    "deepseek_v2": shape("deepseek_v2"),
    "gpt_oss": DENSE | {"intermediate_size": 256, "num_attention_heads": 8, "head_dim": 64},
}
LARGE: dict[str, dict[str, Any]] = {"llama_8b": {}}  # only by name
POINTS = {"llama_8b": (8, 3)}  # exit layer, draft length
# What a layer adds falls off so that as much is missing after 8 of 32 as after 4 of 8; the logits' std is such that of
# 128,256 tokens a few tens are likely, as of 256 with the usual one.
# Gemma's lm_head is its embedding: at this width a token follows itself for ever, unless the first layer outweighs it.
GRADES = {"llama_8b": {"decay": 0.85, "sharpness": 4.0}, "gemma3": {"first": 16.0}}
PASSING = ("lossless", "near-ties only")
LIMIT = 560  # seconds for one shape
GRAPHS = {
    "engine.extra.compilation_config.mode": "0",
    "engine.extra.compilation_config.cudagraph_mode": "FULL_DECODE_ONLY",
}


def words(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """The command line of one shape; the user's own words win."""
    layer, k = POINTS.get(name, (LAYERS // 2, 4))
    fixed = {"model": folder, "model.name": name, "model.dtype": "bfloat16", "engine": "gpu", "k": k, "layer": layer}
    fixed |= {"engine.max_num_seqs": 64, "engine.kv_cache_gib": 8 if name in LARGE else 1} | GRAPHS
    fixed["results_dir"] = options.results.absolute()
    if not has_tokenizer(name):
        fixed["engine.extra.skip_tokenizer_init"] = "true"
    own = dict(word.split("=", 1) for word in options.words)
    given = [f"{key}={value}" for key, value in (fixed | own).items()]
    given += ["--batch-invariant"] if options.batch_invariant else []
    given += ["--plant", options.plant] if options.plant else []
    return [sys.executable, "-m", "selfspec_cli", "verify", *given, "--json"]


def has_tokenizer(name: str) -> bool:
    """Whether the vocabulary is that of the tests' tokenizer, so that structured output is verified too."""
    return ARCHITECTURES[name].make(**(SHAPES | LARGE)[name]).vocab_size == VOCAB


def verdict(name: str, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The document of one shape; with an error for one that could not be run."""
    with torch.device("cuda" if name in LARGE and torch.cuda.is_available() else "cpu"):
        dtype = torch.bfloat16 if name in LARGE else torch.float32
        folder = save_tiny(name, root / name, grade=GRADES.get(name), dtype=dtype, **(SHAPES | LARGE)[name])
    if name in LARGE and torch.cuda.is_available():
        torch.cuda.empty_cache()
    if has_tokenizer(name):
        save_tokenizer(folder)
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"} | os.environ | {"PYTHONPATH": paths}
    try:
        done = subprocess.run(
            words(name, folder, options),
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stderr or b""
        return {"verdict": None, "error": f"not done after {LIMIT} s: {said[-2000:]!r}"}
    finally:
        shutil.rmtree(folder)
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        found = {}
    # Where the command fails, its last line is the error alone; its log has the rest.
    return found if "verdict" in found else found | {"verdict": None, "stderr": done.stderr[-3000:]}


def passes(name: str, found: dict[str, Any], batch_invariant: bool) -> bool:
    """Whether the verdict is one that this shape may have."""
    own = str(found.get("reason")).startswith("plain vLLM does not repeat its own outputs")
    return found["verdict"] in PASSING or (name == "gpt_oss" and batch_invariant and own)


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
        for name in chosen.only.split(",") if chosen.only else SHAPES:
            start = time.perf_counter()
            found[name] = verdict(name, Path(root), chosen)
            one = found[name]
            good &= passes(name, one, chosen.batch_invariant)
            counts = f"{one.get('accepted')} of {one.get('drafted')} accepted"
            why = one.get("reason") or one.get("error") or one.get("stderr")
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
