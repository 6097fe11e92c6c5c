"""The method in plain PyTorch: greedy output is plain decoding's, sampled output has its distribution exactly."""

import math
from collections import defaultdict
from functools import partial
from itertools import product

import pytest

torch = pytest.importorskip("torch")

from selfspec_cli.early_exit import reference  # noqa: E402
from selfspec_cli.early_exit.gates import GATES  # noqa: E402
from selfspec_cli.early_exit.gates.base import Distribution  # noqa: E402
from selfspec_cli.early_exit.reference import always, confident, generate, probabilities, random_decoder  # noqa: E402

DEPTH, PROMPT, LENGTH = 8, [5, 17, 3], 60


@pytest.fixture(scope="module")
def model():
    return random_decoder(DEPTH)


@pytest.fixture(scope="module")
def plain(model) -> list[int]:
    """Decoded without drafts, and without a cache."""
    text = [*PROMPT]
    for _ in range(LENGTH):
        text.append(int(model(text, model.new_cache(len(text)), 0)[-1].argmax()))
    return text[len(PROMPT) :]


@pytest.mark.parametrize("gate", [always, confident(0.3), confident(1.1)], ids=["none", "maxp", "shut"])
@pytest.mark.parametrize(("layers", "k"), [(1, 1), (2, 5), (4, 3), (7, 8), (DEPTH, 4)])
def test_greedy_output_is_plain_decodings(model, plain, layers, k, gate):
    draft = partial(model, layers=layers)
    text, rounds = generate(model, draft, model.new_cache(len(PROMPT) + LENGTH + 2 * k), PROMPT, LENGTH, k, gate)
    assert text == plain
    drafted, accepted = sum(one.drafted for one in rounds), sum(one.accepted for one in rounds)
    assert 0 < accepted <= drafted
    assert (accepted == drafted) == (layers == DEPTH)  # the whole model agrees with itself
    assert LENGTH <= 1 + len(rounds) + accepted <= LENGTH + k
    lengths = {one.drafted for one in rounds}
    assert lengths == {k} if gate is always else max(lengths) <= k
    assert gate is always or k == 1 or min(lengths) == 1


@pytest.mark.slow
def test_the_decoder_is_a_llama(model):
    """The logits of transformers' Llama with the same weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=DEPTH,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        rms_norm_eps=model.eps,
        rope_theta=model.theta,
        tie_word_embeddings=False,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.load_state_dict(dict(model.weights))
    text = [3, 9, 200, 41, 7, 7, 90]
    with torch.no_grad():
        want = theirs(input_ids=torch.tensor([text])).logits[0]
    torch.testing.assert_close(model(text, model.new_cache(len(text)), 0), want, atol=1e-4, rtol=1e-4)


def test_the_gate_is_maxp():
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(1)) * 2
    statistic = GATES["maxp"].statistic(Distribution(logits), 1.0)
    for threshold in (0.1, 0.3, 0.6):
        assert [confident(threshold)(row) for row in logits] == (statistic >= threshold).tolist()
    assert len({confident(0.3)(row) for row in logits}) == 2


# ---- the distribution, by enumeration -------------------------------------------------------------------------------

VOCAB = 3


def table(seed: int):
    """A model of two tokens' context: float64 logits [V, V, V], and what makes a `Model` of them."""
    logits = torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1.5

    def model(tokens, cache, start):
        cache[start : start + len(tokens)] = torch.tensor(tokens)  # what a table has in place of keys and values
        return torch.stack(
            [logits[int(cache[at - 1]) if at else 0, int(cache[at])] for at in range(start, start + len(tokens))]
        )

    return model


def every_outcome(run):
    """{result: probability} of run(draw), over all that chance can decide; each path of choices is run once."""
    found, paths = defaultdict(float), [()]
    while paths:
        path, taken, weights = paths.pop(), [], []

        def draw(p, path=path, taken=taken, weights=weights):
            possible = [index for index, one in enumerate(p.tolist()) if one > 0]
            if len(taken) < len(path):
                choice = path[len(taken)]
            else:  # a choice that no path has made yet: this one takes the first, and the others are for later
                choice = possible[0]
                paths.extend((*taken, other) for other in possible[1:])
            taken.append(choice)
            weights.append(float(p[choice]))
            return choice

        result = run(draw)
        found[result] += math.prod(weights)
    return found


def exact(model, length: int, temperature: float) -> dict[tuple[int, ...], float]:
    """The distribution of plain decoding, text by text."""
    found = {}
    for text in product(range(VOCAB), repeat=length):
        p = probabilities(model([1, 2, *text], torch.zeros(length + 2), 0), temperature)
        found[text] = math.prod(float(p[1 + place, token]) for place, token in enumerate(text))
    return found


def drafted(full, draft, length, k, draw, **more) -> tuple[int, ...]:
    return tuple(generate(full, draft, torch.zeros(2 + length + 2 * k), [1, 2], length, k, draw=draw, **more)[0])


@pytest.mark.parametrize("gate", [always, confident(0.5)], ids=["none", "maxp"])
@pytest.mark.parametrize(
    ("temperature", "draft_temperature"), [(1.0, None), (0.6, None), (1.0, 0.0), (1.3, 0.4)], ids=str
)
def test_sampled_output_has_the_distribution_of_plain_decoding(gate, temperature, draft_temperature):
    """Exactly: every choice of drafts, of acceptance and of replacement, weighted by its probability."""
    full, draft, length = table(0), table(1), 3
    more = {"gate": gate, "temperature": temperature, "draft_temperature": draft_temperature}
    found = every_outcome(lambda draw: drafted(full, draft, length, 2, draw, **more))
    want = exact(full, length, temperature)
    assert sum(found.values()) == pytest.approx(1)
    assert found == pytest.approx(want, abs=1e-12)


@pytest.mark.slow
def test_the_demonstration_says_what_it_found(capsys, monkeypatch, model):
    """In its table: the counts of the rounds, and that greedy text is plain decoding's or is not."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    reference.main()
    lines = capsys.readouterr().out.splitlines()[4:]
    cells = [line.split() for line in lines]
    assert [line.endswith("plain decoding's") for line in lines] == [True] * 8 + [False] * 3
    assert [one[-1] for one in cells[8:10]] == ["sampled"] * 2
    _, rounds = generate(model, partial(model, layers=4), model.new_cache(200), [5, 17, 3], 150, 4)
    assert cells[4][:4] == ["0.0", "4", "none", str(sum(one.drafted for one in rounds))]
    monkeypatch.setattr(reference, "verify", lambda full, cache, text, guesses, *_: (len(guesses), 0))
    reference.main()
    assert capsys.readouterr().out.count("WRONG") == 8
