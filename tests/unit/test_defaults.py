"""What drafts where a user names nothing, and that whatever is named is kept."""

from dataclasses import replace

import pytest

from selfspec_cli.early_exit.defaults import LENGTH_KEYS, VIEW_KEYS, Target, completed
from selfspec_cli.early_exit.draft_weights.base import WeightFacts
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.resolved import ResolvedSettings

GIB = 2**30
GPU = Target(
    WeightFacts("cuda", "bfloat16", "", capability=(9, 0)), 16, 1.3e9, None, 120 * GIB, 140 * GIB, 256 * 151936
)
CPU = replace(GPU, weights=WeightFacts("cpu", "float32", ""), left=None, memory=None)
LENGTHS = {"gate": "auto", "num_speculative_tokens": 12, "free_drafts": 12}
DRAWN = {"draft_sample_method": "probabilistic"}
AUTO = {"draft_context": "auto"}


def chosen(target, **spec):
    """What is added to a speculative_config, and why."""
    found, why = completed({"method": "layer_skip", **spec}, target)
    assert {"method": "layer_skip", **spec}.items() <= found.items()
    assert ResolvedSettings.from_user(found, 28, passthrough=("draft_sample_method",))
    return {key: value for key, value in found.items() if key != "method" and key not in spec}, why


@pytest.mark.parametrize("target", [GPU, CPU], ids=["GPU", "CPU"])
def test_ordinary_weights_get_copies_of_four_bits(target):
    added, why = chosen(target)
    assert added == {"draft_weights": "int4"} | LENGTHS | AUTO | (DRAWN if target is GPU else {})
    assert why == "copies of all layers draft well without training (0.7 GiB)"


def test_copies_beside_a_quantised_target_are_kept_as_they_were_made_too():
    target = replace(GPU, bits=8, weights=replace(GPU.weights, quantization="fp8"))
    assert chosen(target)[1] == "copies of all layers draft well without training (1.3 GiB)"


@pytest.mark.parametrize("quantization", ["awq", "gptq", "compressed-tensors"])
def test_weights_of_four_bits_have_no_cheaper_copies(quantization):
    target = replace(GPU, bits=4, weights=replace(GPU.weights, quantization=quantization))
    added, why = chosen(target)
    assert added == {"draft_weights": "none"} | LENGTHS | DRAWN
    assert why.startswith(
        "the target's weights have 4 bits, and copies would be no cheaper, so drafts come from prompt lookup alone"
    )


def test_copies_that_leave_too_little_for_the_cache_are_not_made():
    added, why = chosen(replace(GPU, left=2.2 * GIB))
    assert added["draft_weights"] == "none" and "layer_skip" not in added
    assert why.startswith("4-bit copies take some 0.7 GiB, more than 30% of the 2.2 GiB left beside the weights")
    assert chosen(replace(GPU, left=2.3 * GIB))[0]["draft_weights"] == "int4"
    assert "more than 30% of the 0.0 GiB" in chosen(replace(GPU, left=-1.0))[1]


def test_a_length_that_is_named_is_that_of_prompt_lookup_where_no_layer_drafts():
    assert chosen(replace(GPU, bits=4), num_speculative_tokens=4)[0] == {"draft_weights": "none", "free_drafts": 4}
    with pytest.raises(SettingsError, match=r"'none' and free_drafts = 0: nothing would draft; allowed: free_drafts"):
        chosen(replace(GPU, bits=4), free_drafts=0)


def test_a_checkpoint_that_was_trained_for_early_exit_drafts_from_there():
    added, why = chosen(replace(GPU, exit_layer=6, bits=4))
    assert added["layer_skip"] == 6 and "draft_weights" not in added
    assert why == "the checkpoint says that it was trained to exit there"


def test_drafts_are_drawn_where_their_distributions_leave_memory():
    most = 0.03 * GPU.memory / (2 * 12)
    assert DRAWN.items() <= chosen(replace(GPU, logits=0.99 * most))[0].items()
    assert "draft_sample_method" not in chosen(replace(GPU, logits=1.01 * most))[0]


NAMED = {"layer_skip": 3, "draft_weights": "int8", "skip_layers": "2-3", "vocab": 1000}


@pytest.mark.parametrize("key", NAMED)
def test_where_a_part_of_what_drafts_is_named_nothing_of_it_is_chosen(key):
    assert key in VIEW_KEYS
    added, why = chosen(GPU, **{key: NAMED[key]})
    assert added == LENGTHS | DRAWN | AUTO and why is None


@pytest.mark.parametrize("named", [{"draft_window": 512}, {"draft_context": "full"}, {"draft_context": "blocks:256"}])
def test_where_a_context_is_named_the_layers_that_draft_are_chosen(named):
    assert chosen(GPU, **named)[0] == {"draft_weights": "int4"} | LENGTHS | DRAWN


@pytest.mark.parametrize(
    "named", [{"num_speculative_tokens": 4}, {"gate": "maxp"}, {"gate": "none"}, {"gate": "maxp", "tau": 0.4}]
)
def test_where_lengths_are_named_measured_times_choose_none(named):
    assert set(named) <= set(LENGTH_KEYS)
    assert chosen(GPU, **named)[0] == {"draft_weights": "int4"}


def test_a_limit_by_load_is_no_length_and_free_drafts_may_be_switched_off():
    added, _ = chosen(GPU, length_table="33:3", free_drafts=0)
    assert added == {"draft_weights": "int4", "gate": "auto", "num_speculative_tokens": 12} | DRAWN | AUTO


def test_a_key_without_a_value_counts_as_not_given():
    assert completed({"method": "layer_skip", "layer_skip": None, "gate": None}, GPU)[0]["gate"] == "auto"
