"""What a user may ask of early-exit drafting: the one definition of every draft setting. Free of torch.

The command line's config inherits `DraftSettings`; `resolved.py` reads a speculative_config."""

from dataclasses import dataclass, field
from typing import Any

from selfspec_cli.early_exit import knobs
from selfspec_cli.early_exit.contexts import FULL, SETTING
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.gates import GATES
from selfspec_cli.early_exit.gates.base import THRESHOLD_KEYS as THRESHOLD_KEYS
from selfspec_cli.early_exit.heads import HEADS
from selfspec_cli.early_exit.knobs import knob
from selfspec_cli.early_exit.length_table import FORM, KEY

METHODS = ("layer_skip", "skip")
"""layer_skip drafts and verifies; skip decodes with the first E layers and the head alone (lossy)."""
METHOD_ALIASES = {"selfspec": "layer_skip"}
"""Other names of a method in a speculative_config."""
DRAFTING, SPECULATIVE = ("layer_skip",), ("layer_skip", "draft_model", "vllm")
"""The methods that draft with the model's own layers, and all that draft: the last two are vLLM's own."""
SPECULATIVE_LENGTH = "num_speculative_tokens"
"""vLLM's name of the draft length k in a speculative_config."""
DRAFT_LENGTH = 5
"""k where neither the user nor the model's preset names one."""
AUTO = "auto"
"""The gate under which measured times and acceptance choose how much is drafted (rule.py), at most k."""


@dataclass
class GateConfig:
    """When to stop drafting; its threshold is `DraftSettings.threshold`."""

    kind: str = knob(
        "none", help="the gate: when to stop drafting", choices=GATES, spec_keys=("gate",), methods=DRAFTING
    )


@dataclass
class HeadConfig:
    """The exit head. Without a path it is looked up in `head_dir` by model, layer and the fields here.
    target, rank, bias: what `head=NAME` says besides the kind, as in lsq_argmax, translator_r15 and translator_bias
    (`HeadSpec`); no settings of their own."""

    kind: str = knob(
        "lens",
        help="what turns the exit layer's hidden state into logits; head=NAME says rank, target and bias too: "
        "translator_r15, lsq_argmax, translator_bias",
        choices=HEADS,
        spec_keys=("head",),
        methods=METHODS,
    )
    path: str | None = knob(
        None,
        help="a head file, or a folder that holds one head a layer",
        unset="the head that was fitted into head_dir",
        spec_keys=("head_path", "lsq_head_path"),
        methods=METHODS,
    )
    target: str | None = None
    rank: int | None = None
    bias: bool = False


@dataclass
class DraftSettings:
    """How drafts are made. Ranges and choices are checked by whoever reads the values, not by the constructor."""

    method: str = knob("layer_skip", help="how tokens are decoded", choices=METHODS, spec_keys=("method",))
    layer: int | None = knob(
        None,
        help="exit layer E: layers 0..E-1 draft",
        low=1,
        unset="half of the model's layers, or the exit that it was trained for; all layers with copies or skip_layers",
        spec_keys=("layer_skip",),
        methods=("layer_skip", "skip", "draft_model"),
    )
    k: int | None = knob(
        None,
        help="draft length: most tokens that are drafted in a speculation step",
        unit="tokens",
        low=1,
        high=256,
        because="each draft token costs a step, a place in the verify pass and a slot of the KV cache, and a draft of "
        "that length is never accepted often enough to pay for itself",
        unset=f"{DRAFT_LENGTH}",
        spec_keys=(SPECULATIVE_LENGTH,),
        methods=SPECULATIVE,
    )
    gate: GateConfig = field(default_factory=GateConfig)
    threshold: float | None = knob(
        None,
        help="threshold of the chosen gate; tau, and tau_v for varH, are other names of it",
        limits="those of the gate",
        unset="the gate's own",
        spec_keys=THRESHOLD_KEYS,
        methods=DRAFTING,
    )
    head: HeadConfig = field(default_factory=HeadConfig)
    vocab: str = knob(
        "full",
        help="draft vocabulary: full, so many of the most frequent tokens (in a speculative_config: so many of the "
        "first ids, which byte pair encoding gives to the tokens that it found most often), or a file of token ids",
        spec_keys=("vocab",),
        methods=METHODS,
    )
    draft_weights: str = knob(
        "shared",
        help="the weights that the draft runs on",
        choices=DRAFT_WEIGHTS,
        spec_keys=("draft_weights",),
        methods=DRAFTING,
    )
    draft_weights_path: str | None = knob(
        None,
        help="a file of copies that `selfspec fit-weights` made of this model, of the kind that draft_weights names",
        unset="copies are rounded when the engine starts",
        spec_keys=("draft_weights_path",),
        methods=DRAFTING,
    )
    skip_layers: str | None = knob(
        None,
        help="of layers 0..E-1 those that do not draft, such as 10-15,20",
        limits="layers from 0 to E - 1, at least one of which stays",
        unset="none",
        spec_keys=("skip_layers",),
        methods=DRAFTING,
    )
    draft_context: str = knob(
        FULL,
        help="what of the context drafts attend to, as NAME or NAME:NUMBER; the verify pass attends to everything",
        limits="full, auto, window:TOKENS, blocks:TOKENS, or a kind that an installed package adds",
        spec_keys=(SETTING, "draft_window"),
        methods=DRAFTING,
    )
    draft_sample_method: str = knob(
        "greedy",
        help="which token a draft step takes: the likeliest one (greedy), or one drawn at the request's temperature "
        "(probabilistic), which is accepted more often where requests are sampled",
        choices=("greedy", "probabilistic"),
        spec_keys=("draft_sample_method",),
        of_vllm=True,
        methods=("layer_skip", "draft_model"),
        arm=True,
    )
    length_table: str | None = knob(
        None,
        help="upper limits of the draft length by load: from a number of running requests on (@ a number of tokens of "
        "context) at most K tokens a step; 0 drafts nothing",
        limits=f"{FORM}; K from 0 to k",
        unset="k for every load",
        spec_keys=(KEY,),
        methods=DRAFTING,
        arm=True,
    )
    free_drafts: int = knob(
        0,
        help="drafts that cost nothing: up to so many tokens that followed a request's last tokens before, in its "
        "prompt or output, in place of the model's own draft where that match is trusted; 0: none",
        unit="tokens",
        low=0,
        high=256,
        because="each draft token is a place in the verify pass and a slot of the KV cache",
        spec_keys=("free_drafts",),
        methods=DRAFTING,
        arm=True,
    )
    strict: bool = knob(
        False,
        help="what the engine would warn of in its log is an error that ends it: settings without effect, a head "
        "without a distribution, what falls back to a slower way, drafts from logits that are no numbers",
        spec_keys=("strict",),
        methods=DRAFTING,
    )
    acceptance_length: float | None = knob(
        None,
        help="synthetic acceptance: a verify step yields so many tokens, whatever was drafted (CUDA only)",
        unit="tokens",
        low=1,
        unset="drafts are verified",
        spec_keys=("synthetic_acceptance_length",),
        of_vllm=True,
        methods=SPECULATIVE,
        arm=True,
        rare=True,
    )


OPTIONS = knobs.options(DraftSettings)
"""Every draft setting by its dotted key."""

USER_KEYS = tuple(key for option in OPTIONS.values() for key in option.knob.spec_keys if not option.knob.of_vllm)
"""The keys of a speculative_config that this package reads; all others belong to vLLM."""


def arm_settings(settings: DraftSettings) -> dict[str, Any]:
    """The settings that tell arms apart and are not at their default, by key, where the method uses them."""
    used = (option for option in OPTIONS.values() if option.knob.arm and settings.method in option.knob.methods)
    values = {option.key: knobs.read(settings, option.key) for option in used}
    return {key: value for key, value in values.items() if value != OPTIONS[key].default}


def to_spec(settings: DraftSettings) -> dict[str, Any]:
    """Settings as a user would write them in a speculative_config, with the threshold in force. Head, draft vocabulary
    and context only where they are not the default, the kind of a head only where no file says it."""
    spec: dict[str, Any] = {}
    for option in OPTIONS.values():
        about = option.knob
        if about.spec_keys and not about.of_vllm and settings.method in about.methods:
            spec[about.spec_keys[0]] = knobs.read(settings, option.key)
    for key, value in (("head", HeadConfig.kind), ("vocab", DraftSettings.vocab), (SETTING, FULL)):
        if spec.get(key) == value or (key == "head" and settings.head.path is not None):
            del spec[key]
    if settings.method == "layer_skip":
        spec["threshold"] = gate_threshold(settings)
    return {"method": str(settings.method)} | spec | vllm_keys(settings)


def vllm_keys(settings: DraftSettings) -> dict[str, Any]:
    """The settings that are vLLM's own keys of a speculative_config; nothing for those left at their default."""
    keys: dict[str, Any] = {}
    if settings.draft_sample_method != DraftSettings.draft_sample_method:
        keys |= {"draft_sample_method": settings.draft_sample_method}
    if settings.acceptance_length is not None:
        keys |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": settings.acceptance_length}
    return keys


def gate_threshold(settings: DraftSettings) -> float | None:
    """The threshold that the chosen gate uses; None for a gate that has none."""
    rule = GATES[settings.gate.kind]
    return rule.default if settings.threshold is None or rule.key is None else settings.threshold
