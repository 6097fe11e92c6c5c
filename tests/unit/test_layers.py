"""Which layers draft: how sets of them are written and read, refused, and told apart by keys."""

import pytest

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.layers import as_text, skipped_layers
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.engine.arguments import speculative_config

SPEC = {"method": "layer_skip", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("value", "layers", "text"),
    [
        (None, (), None),
        ("", (), None),
        ("7", (7,), "7"),
        ("10-15,20", (10, 11, 12, 13, 14, 15, 20), "10-15,20"),
        (" 3 , 1-2 , 2 ", (1, 2, 3), "1-3"),
        ([5, 4, 9, 5], (4, 5, 9), "4-5,9"),
        ((0,), (0,), "0"),
    ],
)
def test_sets_of_layers_are_read_and_written(value, layers, text):
    assert skipped_layers(value) == layers
    assert as_text(layers) == text
    assert skipped_layers(text) == layers


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("10-", "'10-' is no layer and no range"),
        ("-3", "'-3' is no layer"),
        ("15-10", "runs backwards; write 10-15"),
        ([1, -2], "-2 is no layer"),
        (3.5, "must be layers counted from 0"),
    ],
)
def test_what_names_no_layers_is_refused(value, message):
    with pytest.raises(SettingsError, match=f"^skip_layers.*{message}"):
        skipped_layers(value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"layer_skip": 3, "skip_layers": "0-2"}, "leaves none of 3 layers"),
        ({"layer_skip": 3, "skip_layers": {"1": 2}}, "must be layers counted from 0"),
    ],
)
def test_a_view_that_there_is_not_is_refused(spec, message):
    with pytest.raises(SettingsError, match=message):
        ResolvedSettings.from_user({**SPEC, **spec}, 24)


def test_the_command_line_takes_a_set_without_quotes_and_a_list_of_sets_with_them(tmp_path):
    (cfg,) = compose_runs(overrides=["skip_layers=10-15,20"], sweep=False)
    assert cfg.skip_layers == "10-15,20" and cfg.layer is None  # all layers, not the exit that suits the model
    assert speculative_config(cfg, tmp_path)["skip_layers"] == "10-15,20"
    cfgs = compose_runs(overrides=["skip_layers=null,'10-15','10-15,20'", "draft_weights=int8"])
    assert [one.skip_layers for one in cfgs] == [None, "10-15", "10-15,20"]
    assert [one.layer for one in cfgs] == [3, None, None]
    (cfg,) = compose_runs(overrides=["skip_layers=5", "layer=8"], sweep=False)
    assert (cfg.layer, cfg.skip_layers) == (8, "5")
