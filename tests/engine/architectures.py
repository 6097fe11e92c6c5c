"""Every decoder-only architecture of vLLM's registry, as a tiny model of random weights: does early exit work with it?

    python tests/engine/architectures.py --out FILE [NAME ...]

    VLLM_BATCH_INVARIANT=1 python tests/engine/architectures.py --out FILE --heads-of-128 --set dtype=bfloat16 \\
        gpu_memory_utilization=0.1 [NAME ...]

asks each, the second time on a GPU, in a process of its own, forked from one that has imported vLLM, and appends a line
of JSON to FILE; an architecture that is in FILE already is left out. docs/limits.md has a table that is made of
such a file (docs/generate/limits_tables.py). A line:

- `name`: as in a model's config.json; `served_by`: vLLM's class for it; `layers`: where its decoder layers are.
- `verdict`: "works" (greedy output is the plain engine's, drafts were made, some accepted), "refused" (by us, with
  `reason`), "wrong" (another output), "fails" (an error of ours), "vllm" (the plain engine did not run the model here,
  with `reason`), "no model" (transformers has no such class, so no tiny model can be made), "not asked" (yet).
- `drafted`, `accepted`: tokens."""

import argparse
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import yaml

LAYERS, EXIT, K = 4, 2, 3
VOCAB, MAX_LEN = 256, 512
PROMPTS, TOKENS = 6, 32
DAMPING = 0.2  # of the weights of the layers after the exit, so that its drafts are often the model's tokens


def alike(value: Any, names: str) -> dict[str, Any]:
    """The same value for each of some fields."""
    return dict.fromkeys(names.split(), value)


HIDDEN = "hidden_size n_embd d_model word_embed_proj_dim embedding_size"
INNER = "intermediate_size n_inner ffn_dim ffn_hidden_size intermediate_size_mlp"
EXPERT = "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size"
SHAPE: dict[str, Any] = (
    alike(VOCAB, "vocab_size")
    | alike(64, f"{HIDDEN} {EXPERT} qk_rope_head_dim attention_chunk_size")
    | alike(128, INNER)
    | alike(LAYERS, "num_hidden_layers n_layer n_layers num_layers")
    | alike(2, "num_attention_heads n_head n_heads num_heads num_experts_per_tok moe_k moe_topk eos_token_id")
    | alike(1, "num_key_value_heads bos_token_id n_shared_experts moe_num_shared_experts n_group topk_group")
    | alike(4, "num_experts num_local_experts n_routed_experts moe_num_experts")
    | alike(32, "head_dim qk_nope_head_dim v_head_dim query_pre_attn_scalar")
    | alike(MAX_LEN, "max_position_embeddings n_positions n_ctx max_seq_len")
    | alike(0, "pad_token_id moe_layer_start_index num_nextn_predict_layers")
    | {"first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None}
    | {"rotary_dim": 16, "sliding_window": 48, "partial_rotary_factor": 0.5}
)
"""Fields of a tiny model's config; each config takes those that it has."""

HEADS_OF_128: dict[str, Any] = (
    alike(256, HIDDEN)
    | alike(512, f"{INNER} {EXPERT}")
    | alike(128, "head_dim v_head_dim qk_nope_head_dim")
    | {"num_attention_heads": 2, "rotary_dim": 64}
)
"""What is different on a GPU, where FlashAttention 3 is not batch-invariant at smaller heads."""

CHANGES: dict[str, dict[str, Any]] = {
    "DbrxForCausalLM": {
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "FalconForCausalLM": {"new_decoder_architecture": True, "num_kv_heads": 1, "ffn_hidden_size": None},
    "GptOssForCausalLM": {"head_dim": 64, "hidden_size": 128},
    "GPTJForCausalLM": {"n_head": 2, "rotary_dim": 16},
    "Gemma3nForCausalLM": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 32,
    },
    "OPTForCausalLM": {"do_layer_norm_before": True},
    "StableLmForCausalLM": {"partial_rotary_factor": 0.5},
}
"""What single architectures need beside it."""

EXTRA: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": {"topk_method": "noaux_tc"},
    "HYV3ForCausalLM": {"first_k_dense_replace": 1},
    "AfmoeForCausalLM": {"score_func": "sigmoid", "route_norm": True},
    "Glm4MoeForCausalLM": {"head_dim": 32},
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace": 1},
}
"""What vLLM asks of a checkpoint's config.json that the class of transformers 5 does not write."""

BORROWED: dict[str, tuple[str, dict[str, Any]]] = {
    "MiMoForCausalLM": ("Qwen2ForCausalLM", {"num_nextn_predict_layers": 1}),
    "MiniCPMForCausalLM": (
        "LlamaForCausalLM",
        {"dim_model_base": 8, "scale_emb": 12, "scale_depth": 1.4, "num_experts": 0},
    ),
    "InternLM3ForCausalLM": ("LlamaForCausalLM", {}),
    "IQuestCoderForCausalLM": ("LlamaForCausalLM", {}),
    "TeleChat3ForCausalLM": ("LlamaForCausalLM", {}),
    "LLaMAForCausalLM": ("LlamaForCausalLM", {}),
}
"""Architectures that transformers has no class for, and whose checkpoints have the config and the names of weights of
one that it has -> that one, and what their config says beside it."""


ENGINES: dict[str, dict[str, Any]] = {"HrmTextForCausalLM": {"max_num_batched_tokens": MAX_LEN}}
"""Arguments of the engine that single architectures need. Of HrmText vLLM cuts no prompts: one that is longer than a
step takes would wait for ever."""

ATTEMPTS: tuple[dict[str, Any], ...] = (
    {"dtype": "bfloat16"},
    {"load_format": "dummy"},
    {"load_format": "dummy", "dtype": "bfloat16"},
)
"""What else is tried where the plain engine cannot run a model in float32 from its file: kernels for bfloat16 alone,
and checkpoints that transformers 5 saves under other names than vLLM reads; then they are vLLM's random ones."""


def names() -> list[str]:
    """What vLLM lists as decoders that generate text."""
    from vllm.model_executor.models import registry

    text = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
    backend = {name for name, (_, kind) in registry._TRANSFORMERS_SUPPORTED_MODELS.items() if kind in text}
    return sorted(backend | registry._TEXT_GENERATION_MODELS.keys())


def save(name: str, folder: Path) -> None:
    """Make a tiny model of an architecture. Raises LookupError where transformers has no class for it."""
    import torch
    import transformers

    torch.manual_seed(0)
    source, more = BORROWED.get(name, (name, {}))
    kind = getattr(transformers, source, None)
    if kind is None:
        raise LookupError("transformers has no class for it")
    known = kind.config_class()
    shape = {key: value for key, value in SHAPE.items() if hasattr(known, key)} | CHANGES.get(name, {})
    model = _made(kind, shape).float().eval()
    config = model.config
    with torch.no_grad():
        for key, weight in model.named_parameters():
            _randomise(key, weight, "gemma" in config.model_type)
    model.save_pretrained(folder)
    more = more | EXTRA.get(name, {})
    if more or source != name:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more | {"architectures": [name]}))


def _made(kind: Any, shape: dict[str, Any]) -> Any:
    """A model of a class of transformers'; fields of the config that it does not take so are left as it has them."""
    while True:
        try:
            return kind(kind.config_class(**shape))
        except Exception as error:
            field = re.search(r"(?:field|property) '(\w+)'", str(error))
            if field is None or field[1] not in shape:
                raise
            shape = {key: value for key, value in shape.items() if key != field[1]}


def _randomise(name: str, weight: Any, gain_beside_one: bool) -> None:
    """Matrices that keep the size of what they map, norms that are not all ones; layers after the exit matter less."""
    import torch

    norm = weight.dim() == 1
    if norm:
        weight.add_(0.2 * torch.randn_like(weight))
    else:
        weight.normal_(std=weight.shape[-1] ** -0.5)
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if numbers and numbers[0] >= EXIT:
        if norm and gain_beside_one and "norm" in name:
            weight.copy_((1 + weight) * DAMPING - 1)
        else:
            weight.mul_(DAMPING)


SPEC = ("draft_weights", "skip_layers", "draft_context")
"""Of what may be asked for beside, what belongs in the speculative_config."""


def ask(folder: Path, **changes: Any) -> dict[str, Any]:
    """A plain engine and one that drafts, over a model that was saved: everything of a line but its name.

    changes: to the engine's arguments, and to the speculative_config."""
    from harness import greedy, layer_skip, live, ragged_prompts, tokens

    from selfspec_cli.early_exit.errors import SettingsError
    from selfspec_cli.vllm_plugin.decoder import place_of

    prompts, found, problems = ragged_prompts(PROMPTS, VOCAB), {}, []
    spec = {key: changes.pop(key) for key in SPEC if key in changes}
    params = greedy(TOKENS)
    for more in ({}, *ATTEMPTS):
        try:
            with live(folder, **changes, **more) as engine:
                model = engine.runner.get_model()
                found |= {"served_by": type(model).__name__, **more}
                want = tokens(engine.generate(prompts, params))
            changes |= more
            break
        except Exception as error:
            problems.append(_in_a_line(error))
    else:
        return found | {"verdict": "vllm", "reason": problems[-1], "first": problems[0]}
    try:
        place = place_of(model)
        found["layers"] = ".".join((*place.path, place.name))
        del model
        with live(folder, layer_skip(EXIT, K, **spec), **changes) as engine:
            got = tokens(engine.generate(prompts, params))
            counts = engine.counts()
    except SettingsError as error:
        return found | {"verdict": "refused", "reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        return found | {"verdict": "fails", "reason": _in_a_line(error)}
    found |= {"drafted": counts.drafted, "accepted": counts.accepted}
    if got != want:
        wrong = sum(one != other for one, other in zip(got, want, strict=True))
        return found | {"verdict": "wrong", "reason": f"{wrong} of {PROMPTS} outputs are not the plain engine's"}
    if not counts.accepted:
        return found | {"verdict": "fails", "reason": "no draft was accepted"}
    return found | {"verdict": "works"}


def _in_a_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"


def line(name: str, **changes: Any) -> dict[str, Any]:
    """What is said of one architecture."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            save(name, Path(folder))
        except LookupError as error:
            return {"name": name, "verdict": "no model", "reason": str(error)}
        except Exception as error:
            return {"name": name, "verdict": "no model", "reason": f"not made: {_in_a_line(error)}"}
        found = {"name": name, **ask(Path(folder), **ENGINES.get(name, {}), **changes)}
        return {key: text.replace(folder, "MODEL") if isinstance(text, str) else text for key, text in found.items()}


# ---- the script -----------------------------------------------------------------------------------------------------


def prepare(replace: Callable[..., Any] = setattr) -> None:
    """Call it before the first engine.

    Weights of vLLM's load_format=dummy then keep the size of what they map; those of layers after the exit are damped
    as in a file. vLLM's own are so small that every logit is the same."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    own = DummyModelLoader.load_weights

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        own(self, model, model_config)
        torch.manual_seed(0)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if weight.is_floating_point():
                    plain = torch.ones_like(weight, dtype=torch.float32)
                    _randomise(key, plain, False)
                    weight.copy_(plain)

    replace(DummyModelLoader, "load_weights", load_weights)


def _in_a_fork(name: str, seconds: int, changes: dict[str, Any]) -> dict[str, Any]:
    """The line of one architecture, made in a child of this process, which ends with it, or after so many seconds."""
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, fork, initializer=signal.alarm, initargs=(seconds,)) as child:
        try:
            return child.submit(line, name, **changes).result()
        except (Exception, SystemExit) as error:
            return {"name": name, "verdict": "fails", "reason": _in_a_line(error)}


def asked(file: Path) -> dict[str, dict[str, Any]]:
    """The lines of a file by their names; of two with one name the later one, and none that says "not asked"."""
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines() if file.exists() else ())
    return {one["name"]: one for one in lines if one["verdict"] != "not asked"}


def main() -> None:
    """Ask what FILE does not have yet."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="architectures; all of vLLM's registry where none is given")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines, to append to")
    parser.add_argument("--seconds", type=int, default=120, help="for one architecture")
    parser.add_argument("--heads-of-128", action="store_true", help="larger models, for a GPU")
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="arguments of every engine, such as model_impl=transformers and enforce_eager=false, or keys of the "
        "speculative_config: " + ", ".join(SPEC),
    )
    given = parser.parse_args()
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
    )
    import harness  # noqa: F401
    import transformers  # noqa: F401
    from vllm import LLM  # noqa: F401
    from vllm.model_executor.models import registry

    prepare()
    registry._run_in_subprocess = lambda ask: ask()  # a class is looked at here, not by a process that imports vLLM
    changes = {key: yaml.safe_load(text) for key, text in (one.split("=", 1) for one in given.set)}
    if given.heads_of_128:
        SHAPE.update(HEADS_OF_128)
    for name in given.names or names():
        if name not in names():
            raise SystemExit(f"{name}: vLLM's registry has no such decoder")
        if name in asked(given.out):  # also by another run of this script meanwhile
            continue
        found = _in_a_fork(name, given.seconds, changes)
        with open(given.out, "a", encoding="utf-8") as out:
            out.write(json.dumps(found) + "\n")
        counted = f"{found.get('accepted', '')}/{found.get('drafted', '')}"
        print(f"{found['verdict']:9} {name} {found.get('layers', '')} {counted} {found.get('reason', '')}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # fixed_times
    main()
