"""What drafts, as one object: what is read of settings, what goes into keys, rows and tuned files, what is refused."""

from dataclasses import FrozenInstanceError

import pytest
from refusals import said

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.keys import Keys
from selfspec_cli.config.schema import HeadConfig, RunConfig, resolved
from selfspec_cli.early_exit import view
from selfspec_cli.early_exit.contexts import CONTEXTS, Context
from selfspec_cli.early_exit.contexts.base import DraftContext
from selfspec_cli.early_exit.errors import SettingsError
from selfspec_cli.early_exit.resolved import ResolvedSettings
from selfspec_cli.early_exit.settings import DraftSettings
from selfspec_cli.early_exit.view import DraftView, all_columns, as_text, skipped_layers
from selfspec_cli.engine.deployment import speculative_config
from selfspec_cli.record import tables
from selfspec_cli.report.rows import label

VIEWS = [
    ({}, {}),
    ({"draft_weights": "int8"}, {"draft_weights": "int8"}),
    ({"skip_layers": "2,3"}, {"skip_layers": "2-3"}),
    ({"draft_context": "window:64"}, {"draft_window": 64}),
]


class Ends(DraftContext):
    """A kind that a package may add: no setting, column or list knows it."""

    name, help, numbers = "ends", "the first and the last tokens", {"FIRST": 16, "LAST": 16}

    def attended(self, tokens, *values):
        return sum(values)


@pytest.fixture
def ends(monkeypatch):
    monkeypatch.setattr(CONTEXTS, "_loaded", ({**CONTEXTS, "ends": Ends()}, {}))


@pytest.mark.parametrize(("given", "options"), VIEWS)
def test_a_view_is_what_is_not_the_default_and_two_spellings_of_one_are_equal(given, options):
    view = DraftView.of(DraftSettings(layer=6, **given))
    assert view.options() == options
    assert view == ResolvedSettings.from_user({"layer_skip": 6, **options}, 12).view
    with pytest.raises(FrozenInstanceError):
        view.layer = 3


def test_method_skip_has_layers_a_head_and_a_vocabulary_and_nothing_else():
    settings = DraftSettings(
        method="skip", layer=6, draft_weights="int8", draft_context="window:64", skip_layers="1", vocab="9"
    )
    assert DraftView.of(settings) == DraftView(6, vocab="9")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft_context": "windw:64"}, "did you mean 'window'?"),
        ({"draft_context": "window"}, "draft_context = 'window': write window:TOKENS"),
        ({"draft_context": "full:4"}, "draft_context = 'full:4': write full"),
        ({"draft_context": "window:8"}, "draft_context = window:8: tokens 8 is out of range; allowed: 16 or more"),
    ],
)
def test_what_is_no_view_is_refused_alike_on_the_command_line_and_in_a_speculative_config(given, message):
    assert message in said(SettingsError, lambda: DraftView.of(DraftSettings(layer=6, **given)).check())
    assert message in said(SettingsError, ResolvedSettings.from_user, {"layer_skip": 6, **given}, 12)


def test_a_further_kind_of_context_needs_no_setting_of_its_own(ends):
    """Key, row, label, tuned file and bytes of a kind that nothing but the registry knows."""
    cfg = resolved(RunConfig(layer=6, draft_context="ends:16:48"))
    view = DraftView.of(cfg)
    assert view.context == Context("ends", (16, 48)) and view.context.attended(1000) == 64
    assert view.overrides() == ["layer=6", "head=lens", "vocab=full", "draft_context=ends:16:48"]
    row = tables.planned(cfg, "a key")
    assert (row.draft_context, row.draft_window) == ("ends:16:48", None)
    assert "ends:16:48" in label(row)
    assert Keys().settings(cfg) != Keys().settings(resolved(RunConfig(layer=6)))
    settings = ResolvedSettings.from_user({"layer_skip": 6, "draft_context": "ends:16:48"}, 12)
    assert settings.context == view.context
    assert ResolvedSettings.from_dict(settings.to_dict()) == settings


def test_no_more_is_attended_to_than_there_is():
    assert Context("window", (64,)).attended(40) == 40
    assert Context("window", (64,)).attended(1000) == 64
    assert Context().attended(1000) == 1000


def test_a_row_has_a_column_for_each_part_of_a_view():
    cfg = RunConfig(
        layer=6,
        head=HeadConfig("translator", rank=15),
        vocab="1024",
        draft_weights="int4",
        draft_weights_path="a/b.safetensors",
        skip_layers="1",
        draft_context="window:64",
    )
    row = vars(tables.planned(resolved(cfg), "a key"))
    expected = [6, "translator_r15", "1024", "int4", "b.safetensors", "1", 64, None]
    assert [row[name] for name in all_columns()] == expected


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, ("E=half", "lens")),
        ({"draft_weights": "int4"}, ("E=all", "lens · int4 draft")),
        ({"skip_layers": "1"}, ("E=all without 1", "lens")),
        ({"layer": 6}, ("E=6", "lens")),
    ],
)
def test_a_view_in_a_few_words(changes, parts):
    row = tables.planned(RunConfig(**changes), "a key")
    assert view.label(row)[:2] == parts


# ---- sets of layers that draft --------------------------------------------------------------------------------------


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
    found = said(SettingsError, skipped_layers, value)
    assert found.startswith("skip_layers") and message in found


def test_the_command_line_takes_a_set_without_quotes_and_a_list_of_sets_with_them(tmp_path):
    (cfg,) = compose_runs(overrides=["skip_layers=10-15,20"], sweep=False)
    assert cfg.skip_layers == "10-15,20" and cfg.layer is None  # all layers, not the exit that suits the model
    assert speculative_config(cfg, tmp_path)["skip_layers"] == "10-15,20"
    cfgs = compose_runs(overrides=["skip_layers=null,'10-15','10-15,20'", "draft_weights=int8"])
    assert [one.skip_layers for one in cfgs] == [None, "10-15", "10-15,20"]
    assert [one.layer for one in cfgs] == [3, None, None]
    (cfg,) = compose_runs(overrides=["skip_layers=5", "layer=8"], sweep=False)
    assert (cfg.layer, cfg.skip_layers) == (8, "5")
