"""Where a loaded model keeps its embedding and its lm_head, by whichever names."""

import pytest
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


@pytest.mark.parametrize("head", ["lm_head", "output"])
def test_a_head_of_its_own(head):
    model = causal_lm(head=head)
    assert decoder.output_projection(model) is getattr(model, head)


@pytest.mark.parametrize("embedding", ["embed_tokens", "tok_embeddings", "word_embeddings"])
def test_without_one_logits_come_from_the_embedding(embedding):
    model = causal_lm(embedding)
    assert decoder.output_projection(model) is decoder.input_embedding(model) is getattr(model.model, embedding)


def test_an_embedding_by_another_name_is_refused_and_says_so():
    with pytest.raises(SettingsError, match=r"Module is not supported: its input embedding is none of embed_tokens, "):
        decoder.input_embedding(causal_lm("wte"))


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
