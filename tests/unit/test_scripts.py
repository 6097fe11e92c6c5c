"""How scripts of experiments/ and tests/ answer a wrong word."""

import argparse
import re
import sys
from pathlib import Path

import pytest

from experiments import arguments as scripts

ROOT = Path(__file__).resolve().parents[2]


def refused(parse, word: str) -> str:
    with pytest.raises(argparse.ArgumentTypeError) as found:
        parse(word)
    return str(found.value)


def test_a_word_that_is_not_allowed_is_named_with_the_nearest_one_that_is():
    assert scripts.all_among(("joblib", "ray"), "launcher")("ray,joblib") == ["ray", "joblib"]
    said = refused(scripts.all_among(("joblib", "ray"), "launcher"), "ray,jolib")
    assert "jolib" in said and "did you mean 'joblib'" in said


def test_numbers_and_files():
    assert scripts.numbers("1,8,32") == [1, 8, 32]
    assert "1,x" in refused(scripts.numbers, "1,x")
    assert scripts.decimals("0,0.8") == [0.0, 0.8]
    assert "0,x" in refused(scripts.decimals, "0,x")
    archive = ROOT / "results" / "published" / "gpu.jsonl.xz"
    assert scripts.existing(str(archive / "two_gpus")) == archive / "two_gpus"
    assert "nothing_here" in refused(scripts.existing, str(archive / "nothing_here"))


def test_a_wrong_setting_of_a_point_ends_a_script_as_it_ends_the_command(capsys):
    parser = argparse.ArgumentParser()
    assert scripts.one_run(parser, ["layer=3", "k=2"]).k == 2
    with pytest.raises(SystemExit) as ended:
        scripts.one_run(parser, ["gate=maxq"])
    assert ended.value.code == 2
    assert "maxp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["v2", "--module", "verdict", "--module", "v2/staet"], r"'v2/staet' .*allowed: verdict, state, .*'state'\?"),
        (["csots"], r"'csots' .*allowed: costs, .*'costs'\?"),
    ],
)
def test_a_module_or_a_suite_that_there_is_not_ends_mutation_testing_before_any_test_runs(
    words, said, monkeypatch, capsys
):
    pytest.importorskip("mutmut")
    monkeypatch.syspath_prepend(ROOT / "tests" / "mutation")
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    with pytest.raises(SystemExit) as ended:
        __import__("run").main()
    assert ended.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_equal_faults_in_one_function_are_two_mutants(tmp_path, monkeypatch):
    pytest.importorskip("mutmut")
    monkeypatch.syspath_prepend(ROOT / "tests" / "mutation")
    module = tmp_path / "module.py"
    module.write_text("def f(a):\n    a += 1\n    print(a)\n    a += 1\n    return a\n")
    found = list(__import__("make").mutants_of(module, tmp_path))
    assert {mutant.line for mutant in found if mutant.now == "a += 2"} == {2, 4}
    keys = [__import__("run").key_of(vars(mutant)) for mutant in found]
    assert len(keys) == len(set(keys))
