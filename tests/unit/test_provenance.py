import json
import subprocess

from selfspec_cli.config.files import load_config
from selfspec_cli.config.keys import run_key
from selfspec_cli.config.schema import RunConfig
from selfspec_cli.record import provenance


def test_a_run_folder_holds_the_config_and_what_produced_it(tmp_path):
    cfg = RunConfig(results_dir=str(tmp_path), layer=4)
    folder = provenance.write(cfg, "r1", ["selfspec", "bench"])
    assert folder == tmp_path / "runs" / run_key(cfg)
    assert load_config(folder / "config.yaml") == cfg
    facts = json.loads((folder / "run.json").read_text())
    assert (facts["run_id"], facts["command"]) == ("r1", ["selfspec", "bench"])
    assert facts["versions"]["python"].startswith("3.")
    assert facts["versions"]["selfspec"]
    assert facts["hardware"]["cores"] >= 1
    assert facts["hardware"]["memory_mib"] > 100
    assert provenance.write(cfg, "r2").samefile(folder)  # a later run of the key replaces it
    assert sorted(file.name for file in folder.iterdir()) == ["config.yaml", "run.json"]


def test_git_revision_and_changes(tmp_path):
    assert provenance.git_revision(str(tmp_path)) is None
    repo = tmp_path / "repo"
    repo.mkdir()
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=repo, check=True)
    clean = provenance.git_revision(str(repo))
    assert clean is not None
    assert (len(clean["revision"]), clean["dirty"]) == (40, False)
    (repo / "file").write_text("x")
    provenance.git_revision.cache_clear()
    assert provenance.git_revision(str(repo))["dirty"] is True


def test_the_device_is_the_gpu_where_there_is_one():
    machine = {"cpu": "A CPU", "cores": 2, "gpus": []}
    assert provenance.device(machine) == "A CPU, 2 cores"
    assert provenance.device({**machine, "gpus": ["NVIDIA H200"]}) == "NVIDIA H200"
    assert provenance.device({**machine, "gpus": ["NVIDIA H200"] * 2}) == "2x NVIDIA H200"
