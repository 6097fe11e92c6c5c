"""What vLLM's log says of early exit, which to vLLM is a `draft_model`. Plain engines do not get here."""

import hashlib
import json

from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.vllm_plugin.detection import SETTINGS_KEY
from selfspec_cli.vllm_plugin.vllm_names import SpeculativeConfig


def in_words(settings: ResolvedSettings, num_layers: int) -> str:
    """What an engine does, such as: drafting with layers 0 to 2 of 24, gate maxp at 0.35, up to 4 tokens."""
    layers = f"layers 0 to {settings.layer - 1} of {num_layers}" if settings.layer > 1 else f"layer 0 of {num_layers}"
    head = f"the head in {settings.head.path}" if settings.head.path else None
    if settings.vocab != ResolvedSettings.vocab:
        ids = (
            f"the first {settings.vocab} token ids"
            if settings.vocab.isdigit()
            else f"the token ids in {settings.vocab}"
        )
        head = f"{head + ' ' if head else ''}over {ids}"
    if not settings.verify:
        parts = [f"decoding with {layers} alone", head, "without verification: the output is not the model's own"]
    else:
        if settings.chooses_width:
            gate = "as many as measured times and acceptance say"
        else:
            gate = "no gate" if settings.gate.kind == "none" else f"gate {settings.gate.kind} at {settings.threshold:g}"
        weights = None if settings.draft_weights == "shared" else f"{settings.draft_weights} copies of their weights"
        tokens = "1 token" if settings.k == 1 else f"up to {settings.k} tokens"
        free = f"prompt lookup of up to {settings.free_drafts} tokens" if settings.free_drafts else None
        parts = [f"drafting with {layers}", weights, head, gate, tokens, free]
        if not settings.layers_draft:
            parts = [f"drafting by {free} alone", gate]
    return ", ".join(part for part in parts if part)


class EarlyExitConfig(SpeculativeConfig):
    """vLLM's SpeculativeConfig with another name in the log and a key of its own. Its fields are vLLM's."""

    def compute_hash(self) -> str:
        """With what drafts: the memory depends on it that vLLM measures and may keep under this key."""
        settings = json.dumps(getattr(self, SETTINGS_KEY), sort_keys=True)
        return hashlib.sha256(f"{super().compute_hash()} {settings}".encode()).hexdigest()

    def __repr__(self) -> str:
        settings = ResolvedSettings.from_dict(getattr(self, SETTINGS_KEY))
        model = self.target_model_config
        layers = int(model.hf_text_config.num_hidden_layers)
        return f"EarlyExit({in_words(settings, layers)})"
