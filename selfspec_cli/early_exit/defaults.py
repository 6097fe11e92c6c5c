"""What drafts where a user names nothing: chosen from the checkpoint and the memory that it leaves. No torch.

`{"method": "selfspec"}` is complete. Whatever a speculative_config names is kept, and the rest is chosen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from selfspec_cli.early_exit.contexts import AUTO as AUTO_CONTEXT
from selfspec_cli.early_exit.contexts import SETTING
from selfspec_cli.early_exit.draft_weights import DRAFT_WEIGHTS
from selfspec_cli.early_exit.draft_weights.base import WeightFacts
from selfspec_cli.early_exit.rule import WIDTHS
from selfspec_cli.early_exit.settings import AUTO, OPTIONS, SPECULATIVE_LENGTH, THRESHOLD_KEYS
from selfspec_cli.early_exit.view import OWN_SETTINGS

_OF_VIEW = ("layer", "vocab", "head.kind", "head.path", *OWN_SETTINGS)
CONTEXT_KEYS = OPTIONS[SETTING].knob.spec_keys
VIEW_KEYS = tuple(key for name in _OF_VIEW if name != SETTING for key in OPTIONS[name].knob.spec_keys)
"""Keys of a speculative_config that say what drafts, the context apart. Where one is named, nothing of it is chosen."""
LENGTH_KEYS = (SPECULATIVE_LENGTH, "gate", *THRESHOLD_KEYS)
"""Keys that say how much is drafted. Where one is named, measured times choose no widths."""
BYTES_PER_COPIED_WEIGHT = 0.55
"""Of 4-bit copies with their scales, as vllm_plugin/fused_step/ lays them out or as they were made."""
BYTES_BESIDE_QUANTISED = 1.1
"""The same for a quantised target, whose own weights do not multiply in the copies' place: both."""
SHARE_OF_CACHE = 0.3
"""Of the memory left beside the weights, what copies may take: the rest is for the KV cache or, where its size was set
apart, for activations, graphs and other engines."""
SHARE_OF_DRAWN = 0.03
"""Of all memory, what the distributions of drawn drafts may take."""


@dataclass(frozen=True)
class Target:
    """What the choice depends on.
    weights: of the target and the machine. bits: of the target's weights. parameters: that copies would be made of.
    exit_layer: that the checkpoint was trained for, `early_exit_layer` in its config.json. left: bytes that vLLM may
    use in addition to the weights, or free bytes after weights and a KV cache of a given size. memory: of the device;
    both None without a GPU. logits: numbers of a full step, requests times vocabulary."""

    weights: WeightFacts
    bits: float
    parameters: float
    exit_layer: int | None = None
    left: float | None = None
    memory: float | None = None
    logits: float = 0.0


def completed(spec: Mapping[str, Any], target: Target) -> tuple[dict[str, Any], str | None]:
    """A speculative_config with what it leaves open, and why that draft was chosen; None where nothing of it was."""
    given = {key: value for key, value in spec.items() if value is not None}
    chosen: dict[str, Any] = {}
    why = None
    if not any(key in given for key in VIEW_KEYS):
        chosen, why = _draft(target)
    chooses_length = not any(key in given for key in LENGTH_KEYS)
    layers_draft = DRAFT_WEIGHTS[chosen.get("draft_weights", given.get("draft_weights", "shared"))].drafts
    if chooses_length or not layers_draft:
        chosen["free_drafts"] = given.get(SPECULATIVE_LENGTH, WIDTHS[0])
    if chooses_length:
        chosen |= {"gate": AUTO, SPECULATIVE_LENGTH: WIDTHS[0]}
        if layers_draft and not any(key in given for key in CONTEXT_KEYS):
            chosen[SETTING] = AUTO_CONTEXT
        if target.memory and 2 * target.logits * WIDTHS[0] < SHARE_OF_DRAWN * target.memory:
            chosen["draft_sample_method"] = "probabilistic"
    return chosen | given, why


def _draft(target: Target) -> tuple[dict[str, Any], str]:
    """The settings of what drafts, and why."""
    lookup = {"draft_weights": "none"}, "so drafts come from prompt lookup alone, where the text repeats itself"
    if target.exit_layer is not None:
        return {"layer_skip": target.exit_layer}, "the checkpoint says that it was trained to exit there"
    if target.bits <= 5:
        return lookup[0], f"the target's weights have {target.bits:g} bits, and copies would be no cheaper, {lookup[1]}"
    a_weight = BYTES_BESIDE_QUANTISED if target.weights.quantization else BYTES_PER_COPIED_WEIGHT
    copies = a_weight * target.parameters
    if target.left is not None and copies > SHARE_OF_CACHE * target.left:
        return lookup[0], (
            f"4-bit copies take some {copies / 2**30:.1f} GiB, more than {SHARE_OF_CACHE:.0%} of the "
            f"{max(target.left, 0) / 2**30:.1f} GiB left beside the weights, {lookup[1]}"
        )
    reasons = {name: DRAFT_WEIGHTS[name].reason_against(target.weights) for name in ("int4", "int8")}
    for name, reason in reasons.items():
        if reason is None:
            size = f"{copies / 2**30:.1f} GiB"
            return {"draft_weights": name}, f"copies of all layers draft well without training ({size})"
    return lookup[0], f"copies cannot be made here ({reasons['int4']}), {lookup[1]}"
