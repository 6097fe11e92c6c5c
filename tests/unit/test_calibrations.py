from dataclasses import replace

import pytest

from selfspec_cli.artifacts import calibrations
from selfspec_cli.artifacts.calibrations import SavedGate
from selfspec_cli.config.keys import run_key
from selfspec_cli.config.schema import (
    ConfigError,
    GateConfig,
    HeadConfig,
    RunConfig,
    Runner,
)
from selfspec_cli.early_exit.calibration import Calibration

GATE = SavedGate(Calibration("margin", (0.1, 0.5), (0.2, 0.9)), 0.4, {"rounds": 3})
CALIBRATED = RunConfig(layer=3, gate=GateConfig("calibrated"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_saved_and_loaded_are_equal(folder):
    calibrations.save(folder / "a" / "g.json", GATE)
    assert calibrations.load(folder / "a" / "g.json") == GATE


def test_the_file_and_its_threshold_are_found_by_model_and_exit():
    calibrations.save(calibrations.path_for(CALIBRATED, 3), GATE)
    calibrated = calibrations.with_calibration(CALIBRATED)
    assert calibrated.threshold == 0.4
    assert calibrations.map_of(calibrated) == GATE.calibration.to_dict()
    assert run_key(calibrated) != run_key(CALIBRATED)


def test_names_of_earlier_files_stay():
    lsq = HeadConfig("lsq")
    assert calibrations.path_for(CALIBRATED, 3).name == "gate-E3-lens.json"
    assert calibrations.path_for(replace(CALIBRATED, head=lsq, vocab="4096"), 3).name == "gate-E3-lsq-4096.json"


@pytest.mark.parametrize(
    ("change", "ending"),
    [
        ({"draft_weights": "fp8"}, "-fp8"),
        ({"draft_sample_method": "probabilistic"}, "-probabilistic"),
        ({"runner": Runner.v1}, "-v1"),
        ({"acceptance_length": 2.5}, "-accept2.5"),
        ({"head": HeadConfig(path="mine.safetensors")}, ""),
    ],
)
def test_drafts_that_differ_have_calibrations_of_their_own(change, ending):
    other = replace(CALIBRATED, **change)
    assert calibrations.exit_name(other).endswith(ending)
    calibrations.save(calibrations.path_for(CALIBRATED, 3), GATE)
    with pytest.raises(ConfigError, match="draft options of this run"):
        calibrations.with_calibration(other)
    calibrations.save(calibrations.path_for(other, 3), replace(GATE, threshold=0.7))
    assert calibrations.with_calibration(other).threshold == 0.7
    assert calibrations.with_calibration(CALIBRATED).threshold == 0.4


def test_two_vocabularies_of_one_name_are_two(folder):
    for name, text in (("a", "1 2"), ("b", "3 4"), ("c", "1 2")):
        (folder / name).mkdir()
        (folder / name / "v.txt").write_text(text)
    names = [calibrations.exit_name(replace(CALIBRATED, vocab=f"{name}/v.txt")) for name in "abc"]
    assert names[0].startswith("lens-v-")
    assert names[0] == names[2] != names[1]


def test_a_threshold_of_the_users_own_wins():
    calibrations.save(calibrations.path_for(CALIBRATED, 3), GATE)
    assert calibrations.with_calibration(replace(CALIBRATED, threshold=0.7)).threshold == 0.7
    assert calibrations.with_calibration(replace(CALIBRATED, threshold=0.6)).threshold == 0.6


def test_other_gates_are_left_alone():
    cfg = RunConfig(gate=GateConfig("margin"))
    assert calibrations.with_calibration(cfg) is cfg
    assert calibrations.map_of(cfg) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"threshold": 0.4, "calibration": {"feature": "size"}}'])
def test_a_wrong_file_is_named(folder, text):
    (folder / "g.json").write_text(text)
    with pytest.raises(ConfigError, match=r"g\.json"):
        calibrations.load("g.json")


def test_a_missing_file_says_how_to_make_it():
    with pytest.raises(ConfigError, match="selfspec roc layer=3"):
        calibrations.with_calibration(CALIBRATED)
