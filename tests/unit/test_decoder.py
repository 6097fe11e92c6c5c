"""Where a loaded model keeps its embedding and its lm_head, by whichever names."""

import pytest
from refusals import said
from torch import nn

from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.vllm_plugin import decoder


class Layers(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        setattr(self, embedding, nn.Embedding(8, 4))
        self.layers = nn.ModuleList()
        self.start_layer, self.end_layer = 0, 0

    def forward(self, x):
        for layer in self.layers[self.start_layer : self.end_layer]:
            x = layer(x)
        return x


def causal_lm(embedding="embed_tokens", head=None):
    model = nn.Module()
    model.model = Layers(embedding)
    if head is not None:
        setattr(model, head, nn.Linear(4, 8))
    return model


@pytest.mark.parametrize("embedding", ["embed_tokens", "tok_embeddings", "word_embeddings"])
@pytest.mark.parametrize("head", ["lm_head", "output", None])
def test_logits_come_from_a_head_or_else_from_the_embedding(embedding, head):
    model = causal_lm(embedding, head)
    assert decoder.input_embedding(model) is getattr(model.model, embedding)
    assert decoder.output_projection(model) is (getattr(model, head) if head else getattr(model.model, embedding))


def test_an_embedding_by_another_name_is_refused_and_says_so():
    found = said(SettingsError, decoder.input_embedding, causal_lm("wte"))
    assert "Module is not supported: its input embedding is none of embed_tokens, " in found


@pytest.mark.parametrize("whole", [True, False], ids=["a causal LM inside", "a decoder inside"])
def test_a_wrapper_around_a_language_model(whole):
    """vLLM's multimodal models name a causal LM (LLaVA) or its decoder (Idefics3) as what generates text."""
    inner = causal_lm(head="lm_head")
    wrapper = nn.Module()
    wrapper.lm_head = nn.Linear(4, 8)
    wrapper.get_language_model = lambda: inner if whole else inner.model
    assert decoder.decoder_of(wrapper) is inner.model
    assert decoder.output_projection(wrapper) is (inner if whole else wrapper).lm_head
    assert decoder.input_embedding(wrapper) is inner.model.embed_tokens


class Inside(nn.Module):
    """OPT's order: what vLLM calls the model only passes on to the decoder."""

    def __init__(self):
        super().__init__()
        self.decoder = Layers("embed_tokens")

    def forward(self, x):
        return self.decoder(x)


class ByNumber(nn.Module):
    """Layers under another name, which the loop takes by their numbers."""

    def __init__(self):
        super().__init__()
        self.wte, self.h, self.others = nn.Embedding(8, 4), nn.ModuleList([nn.Identity()]), nn.ModuleList()
        self.start_layer, self.end_layer = 0, 1

    def forward(self, x):
        for number in range(self.start_layer, self.end_layer):
            x = self.h[number](x)
        return x


class ToTheEnd(nn.Module):
    """As Hugging Face's decoders are: the loop ends with the list."""

    def __init__(self):
        super().__init__()
        self.norms, self.blocks = nn.ModuleList([nn.LayerNorm(4)]), nn.ModuleList([nn.Identity(), nn.Identity()])

    def forward(self, x):
        for number, block in enumerate(self.blocks[:8]):
            x = self.norms[0](block(x)) + number
        return x


class NoLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity()])

    def forward(self, x):
        return self.layers[0](x)


def around(part, name="model"):
    model = nn.Module()
    setattr(model, name, part)
    return model


@pytest.mark.parametrize(
    ("model", "path", "name", "ends_at_end_layer"),
    [
        (around(Inside()), ("model", "decoder"), "layers", True),
        (around(ByNumber(), "transformer"), ("transformer",), "h", True),
        (around(ToTheEnd()), ("model",), "blocks", False),
    ],
    ids=["inside another part", "by number", "to the end of the list"],
)
def test_layers_are_found_by_the_loop_over_them(model, path, name, ends_at_end_layer):
    place = decoder.place_of(model)
    assert (place.root, place.path, place.name, place.ends_at_end_layer) == (model, path, name, ends_at_end_layer)
    assert place.layers is getattr(place.decoder, name)


class InTwo(nn.Module):
    """Two decoders that run one after the other, each with some of the layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = ToTheEnd(), ToTheEnd()

    def forward(self, x):
        return self.second(self.first(x))


def test_a_model_without_one_loop_over_its_layers_is_refused():
    assert "architecture Module is not supported" in said(SettingsError, decoder.place_of, around(InTwo()))
    no_loop = "no part of it has a forward that loops over a list of its layers"
    assert no_loop in said(SettingsError, decoder.place_of, around(NoLoop()))


def test_a_model_whose_tokens_see_later_ones_is_refused():
    model = causal_lm()
    model.model.layers.append(type(decoder.BOTH_WAYS, (nn.Module,), {})())
    assert "verified tokens would see the drafts after them" in said(SettingsError, decoder.place_of, model)
