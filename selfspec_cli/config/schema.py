"""The schema of one run: every knob that a user can turn, its unit and its only default.

Plain dataclasses, importable in milliseconds and without Hydra: compose.py registers them as Hydra's schema, and
everything past compose.py gets real instances of them. Rules that keep OmegaConf able to read them: not frozen, `Enum`
instead of `Literal`, `str` for paths. An enum's member is named like its value, because OmegaConf looks members up
by name and users type the value.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.head_spec import HeadSpec

MAXP_TAU = 0.35  # threshold of gate maxp where the user gives none
VARH_TAU_V = 5.0  # likewise of gate varH
DRAFT_LENGTH = 5  # k where neither the user nor the model says


class ConfigError(ValueError):
    """Bad input from the user. The command line shows its text, without a traceback, and exits with 2."""


class Method(StrEnum):
    """What is measured."""

    baseline = "baseline"  # the model alone
    layer_skip = "layer_skip"  # early-exit self-speculation
    skip = "skip"  # the first E layers without verification
    draft_model = "draft_model"  # vLLM's own: a second model of E layers (dummy weights only)
    ngram = "ngram"  # vLLM's own: drafts looked up in the text so far


SPECULATIVE = (Method.layer_skip, Method.draft_model, Method.ngram)
EARLY_EXIT = (Method.layer_skip, Method.skip)


class Runner(StrEnum):
    """Which of vLLM's model runners drafts: its own choice, or the one named (CUDA only)."""

    auto = "auto"
    v1 = "v1"
    v2 = "v2"


class DraftWeights(StrEnum):
    """What the draft runs on: the target's own weights, or 8-bit (e4m3) copies of them beside it (CUDA only)."""

    shared = "shared"
    fp8 = "fp8"


class Verification(StrEnum):
    """What a verify pass looks at: all k places of each request, or as many of the batch's likeliest drafts as pay by
    vLLM's cost curves (CUDA graphs only)."""

    full = "full"
    adaptive = "adaptive"


class GateKind(StrEnum):
    """When to stop drafting (`early_exit.gates` says how). `none` never stops before k."""

    none = "none"
    maxp = "maxp"
    varH = "varH"
    entropy = "entropy"
    margin = "margin"
    adaedl = "adaedl"
    survival = "survival"
    calibrated = "calibrated"


class HeadKind(StrEnum):
    """What turns the exit layer's hidden state into logits."""

    lens = "lens"
    lsq = "lsq"
    translator = "translator"


class HeadTarget(StrEnum):
    """What an lsq head is fitted to: the next token of the text, or the full model's own argmax."""

    next_token = "next_token"
    argmax = "argmax"


class TrackerKind(StrEnum):
    """Where rows go besides results/summary.csv."""

    none = "none"
    wandb = "wandb"


@dataclass
class ModelConfig:
    """Which weights, and how vLLM loads them."""

    name: str = "reference"  # what the rows and the figures call it
    path: str = "reference"  # a folder or a Hugging Face id; "reference" is the embedded model
    tokenizer: str | None = None  # None: the one beside the weights
    revision: str | None = None
    dtype: str = "float32"  # auto, float32, bfloat16, float16; on a CPU float32 is what makes two outputs comparable
    quantization: str | None = None
    load_format: str = "auto"  # "dummy" measures speed without the weights
    max_model_len: int | None = None  # tokens; None: the model's own limit
    trust_remote_code: bool = False
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    tensor_parallel_size: int = 1
    exit_layer: int | None = 3  # E where `layer` is not given: what measured best for this model; None: half of it
    draft_length: int | None = 4  # likewise k; None: 5
    pipeline_parallel_size: int = 1  # only 1 is accepted: the draft's layers and the target's must share a worker


@dataclass
class GateConfig:
    """When to stop drafting; its threshold is `tau`, `tau_v` or `threshold` of the run."""

    kind: GateKind = GateKind.none
    calibration: str | None = None  # file of gate `calibrated`; None: what `selfspec roc` saved for this exit


@dataclass
class HeadConfig:
    """The exit head. Without a path it is looked up in `head_dir` by model, layer and the fields here."""

    kind: HeadKind = HeadKind.lens
    path: str | None = None  # a head file, or a folder that holds one head a layer
    target: HeadTarget = HeadTarget.next_token  # of an lsq
    rank: int | None = None  # of a translator; None: full
    bias: bool = False  # fitted with a constant term
    kl: bool = False  # a translator trained by KL divergence after its closed form


@dataclass
class WorkloadConfig:
    """What is generated. Every request has exactly these lengths, so that rows compare."""

    name: str = "headline"
    input_len: int = 32  # prompt tokens a request
    output_len: int = 128  # generated tokens a request, end-of-text ignored
    num_prompts: int = 8  # requests a repeat
    batch: int = 1  # requests in flight at once
    temperature: float = 0.0  # 0 is greedy
    prompts: str = "heldout"  # "heldout" (library code not trained on), "random" (token ids), or a text file


@dataclass
class EngineConfig:
    """vLLM's engine, apart from the model and the method."""

    name: str = "cpu"
    enforce_eager: bool = False  # True: no torch.compile, no CUDA graphs
    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None  # fraction of GPU memory
    kv_cache_gib: float | None = 1.0  # GiB of KV cache on the CPU; None: vLLM decides
    enable_prefix_caching: bool = False  # off: a repeat must not be served from the one before
    enable_chunked_prefill: bool | None = None
    async_scheduling: bool | None = None
    nvtx: bool = False  # named ranges around verify, sample, draft and head, for Nsight Systems
    extra: dict[str, Any] = field(default_factory=dict)  # any other argument of vllm.LLM, by its name


@dataclass
class TrackerConfig:
    """An experiment tracker; Weights & Biases runs offline where there is no key."""

    kind: TrackerKind = TrackerKind.none
    project: str = "selfspec"
    entity: str | None = None


@dataclass
class RunConfig:
    """One measured point."""

    model: ModelConfig = field(default_factory=ModelConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    method: Method = Method.layer_skip
    layer: int | None = None  # exit layer E: layers 0..E-1 draft; None: the model's, see `resolved`
    k: int | None = None  # draft tokens a round, at most; None: the model's, see `resolved`
    tau: float | None = None  # of the gates that compare a probability (go on while it is >= tau); None: MAXP_TAU, or
    # the gate's own default
    tau_v: float | None = None  # varH: go on while Var[-log p] <= tau_v (nats squared); None: VARH_TAU_V
    threshold: float | None = None  # of whatever gate is chosen; overrides tau and tau_v
    vocab: str = "full"  # draft vocabulary: "full", so many of the most frequent tokens, or a file that lists token ids
    draft_weights: DraftWeights = DraftWeights.shared
    verification: Verification = Verification.full
    acceptance_length: float | None = None  # synthetic acceptance: tokens a verify step yields, whatever was drafted
    runner: Runner = Runner.auto
    seed: int = 0  # of prompts and of sampling
    repeats: int = 5  # timed repeats
    warmup: int = 1  # repeats thrown away first
    perplexity_tokens: int = 4096  # held-out tokens scored; 0: perplexity is not measured
    results_dir: str = "results"
    head_dir: str = "ee_head"


# The groups of Hydra and the choice each begins with. The choice of that name holds exactly the schema's defaults
# (a test compares them).
GROUPS: dict[str, str] = {
    "model": "reference",
    "gate": "none",
    "head": "lens",
    "workload": "headline",
    "engine": "cpu",
    "tracker": "none",
}


def gate_threshold(cfg: RunConfig) -> float | None:
    """The threshold that the chosen gate uses; None for `none`, and for `calibrated` where its file is to say."""
    kind = cfg.gate.kind
    if kind is GateKind.none:
        return None
    if cfg.threshold is not None:
        return cfg.threshold
    rule = GATES[kind.value]
    given = {"tau": cfg.tau, "tau_v": cfg.tau_v}.get(rule.key or "")
    if given is not None:
        return given
    return {GateKind.maxp: MAXP_TAU, GateKind.varH: VARH_TAU_V, GateKind.calibrated: None}.get(kind, rule.default)


def resolved(cfg: RunConfig) -> RunConfig:
    """`cfg` with its own `layer` and `k` in place of those that its model brings along."""
    layer = cfg.model.exit_layer if cfg.layer is None else cfg.layer
    k = (cfg.model.draft_length or DRAFT_LENGTH) if cfg.k is None else cfg.k
    return replace(cfg, layer=layer, k=k)


def vocab_size(cfg: RunConfig) -> int | None:
    """Tokens in the draft vocabulary; None for the full one, and for a list whose file says how many."""
    return int(cfg.vocab) if cfg.vocab.isdigit() else None


def head_spec(head: HeadConfig) -> HeadSpec:
    """Which head a config names.

    Raises:
        SettingsError: a combination that there is not, such as a lens of rank 15.
    """
    target = None if head.target is HeadConfig().target else head.target.value  # SCHEMA: target is None by default
    return HeadSpec(head.kind.value, target, head.rank, head.bias, head.kl)


def to_plain(value: Any) -> dict[str, Any]:
    """A config as nested dicts of YAML's own types (enums by value)."""
    return json.loads(json.dumps(asdict(value)))


def dump(cfg: RunConfig) -> str:
    """`cfg` as YAML; `compose.load_config` reads it back to an equal config."""
    import yaml

    return yaml.safe_dump(to_plain(cfg), sort_keys=False, allow_unicode=True)
