"""What a user types: ranges, interpolations, addresses of models, names of folders and of files without a mapping."""

import errno
import os

import pytest

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.config.words import parse


@pytest.mark.parametrize(
    ("typed", "numbers"),
    [
        ("0.1,0.4,0.1", (0.1, 0.2, 0.3)),  # a sum of three times 0.1 is above 0.3, and so is not at the stop yet
        ("0.4,0.1,-0.1", (0.4, 0.3, 0.2)),
        ("0.1,0.30000001,0.1", (0.1, 0.2, 0.3)),  # the stop is above the third by what was written
        ("4,13,4", (4, 8, 12)),
    ],
)
def test_a_range_ends_before_its_stop(typed, numbers):
    assert parse([f"tau=range({typed})"])[0].values == numbers
    assert [*map(type, parse([f"tau=range({typed})"])[0].values)] == [*map(type, numbers)]
    assert sorted(parse([f"tau=shuffle(range({typed}))"])[0].values) == sorted(numbers)


@pytest.mark.parametrize(
    ("typed", "folder"),
    [
        ("${oc.env:SELFSPEC_NOWHERE,out}", "out"),
        ("${oc.env:SELFSPEC_NOWHERE,${oc.env:SELFSPEC_HERE}}/ä b", "/tmp/höme, x/ä b"),
        ("of-${workload.num_prompts}", "of-16"),
        (r"\${oc.env:SELFSPEC_NOWHERE}", "${oc.env:SELFSPEC_NOWHERE}"),  # as it stands
        ("$HOME/a{b}", "$HOME/a{b}"),
    ],
)
def test_text_takes_interpolations_with_defaults_and_escapes(monkeypatch, typed, folder):
    monkeypatch.setenv("SELFSPEC_HERE", "/tmp/höme, x")
    monkeypatch.delenv("SELFSPEC_NOWHERE", raising=False)
    (cfg,) = compose_runs(None, [f"results_dir={typed}", "workload.num_prompts=16"])
    assert cfg.results_dir == folder


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("model.name=[1,2]", "Cannot convert 'list' to string"),
        ("results_dir=${oc.env:SELFSPEC_NOWHERE}", "'SELFSPEC_NOWHERE' not found"),
        ("layer=[1,", "no viable alternative"),
        ("layer", "write key=value"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_own_reason(typed, said):
    with pytest.raises(ConfigError) as refused:
        compose_runs(None, [typed])
    assert said in str(refused.value) and typed.partition("=")[0] in str(refused.value)
    assert ("write key=value" in str(refused.value)) == ("=" not in typed)


@pytest.mark.parametrize("key", ["model", "model.path"])
@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("https://hub.example/Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("https://hub.example/Qwen/Qwen2.5-0.5B/tree/main", "Qwen/Qwen2.5-0.5B"),
        ("hub.example/a/b", "a/b"),
        ("hf://a/b", "a/b"),
        ("s3://bucket/model", "./FOLDER"),
    ],
)
def test_the_address_of_a_model_is_answered_with_the_word_for_it(key, word, instead):
    from selfspec_cli.config.paths import model_path

    def place():
        return model_path(compose_runs(None, [f"{key}={word}"])[0].model)

    with pytest.raises(ConfigError) as refused:
        place()
    assert str(refused.value).endswith(f"write {key}={instead}")


@pytest.mark.parametrize("content", [b"5\n", b"\xff\xfe", b"true"])
def test_a_file_of_a_group_without_a_mapping_is_named(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "conf" / "gate" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        compose_runs(None, ["gate=mine"])
    assert str(file) in str(refused.value)
    assert ("cannot be read" if content == b"\xff\xfe" else "must be a mapping") in str(refused.value)


@pytest.mark.parametrize("number", [errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT, errno.ENOTDIR])
@pytest.mark.parametrize("place", ["out", "out/logs/a.log", "above", "/elsewhere/program"])
def test_a_folder_that_cannot_be_made_is_bad_input(monkeypatch, tmp_path, number, place):
    import typer

    from selfspec_cli.commands.screen import BAD_INPUT, RUN_FAILED, guard

    monkeypatch.chdir(tmp_path)
    folder = "above/out" if place == "above" else "out"
    monkeypatch.setattr("sys.argv", ["selfspec", "bench", f"results_dir={folder}"])
    with pytest.raises(typer.Exit) as ended, guard(as_json=False, debug=False):
        raise OSError(number, os.strerror(number), place)
    assert ended.value.exit_code == (RUN_FAILED if place.startswith("/elsewhere") else BAD_INPUT)
