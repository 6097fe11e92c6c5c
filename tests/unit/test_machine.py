import subprocess
from dataclasses import replace

import pytest

from selfspec_cli.config import machine
from selfspec_cli.config.keys import run_key
from selfspec_cli.config.schema import EngineConfig, ModelConfig, RunConfig

CARDS = [(f"GPU-{number}aaa", "NVIDIA H200") for number in range(8)]
GPU = RunConfig(engine=EngineConfig(device="cuda"))


@pytest.fixture(autouse=True)
def machine_with_gpus(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: CARDS)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_run_on_the_cpu_of_a_machine_with_gpus_is_a_run_on_the_cpu():
    assert machine.device(RunConfig()) == machine.cpu()
    assert "cores" in machine.cpu()


def test_one_gpu_of_eight_is_one_gpu(monkeypatch):
    assert machine.device(GPU) == "NVIDIA H200"
    two = replace(GPU, model=ModelConfig(tensor_parallel_size=2))
    assert machine.device(two) == "2x NVIDIA H200"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert machine.device(two) == "NVIDIA H200"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.device(GPU) == "no GPU"


@pytest.mark.parametrize(
    ("wanted", "shown"),
    [(None, "abc"), ("1", "b"), ("2,0", "ca"), ("GPU-b", "b"), ("GPU-b2,0", "ba"), ("0,7,1", "a"), ("GPU-x", "")],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(wanted, shown):
    cards = [("GPU-a1", "a"), ("GPU-b2", "b"), ("GPU-c3", "c")]
    assert "".join(machine.visible(cards, wanted)) == shown


def test_the_device_and_the_versions_are_part_of_a_key(monkeypatch):
    first, known = run_key(RunConfig()), machine.versions()
    assert run_key(RunConfig()) == first
    with monkeypatch.context() as patched:
        patched.setattr(machine, "cpu", lambda: "another processor, 2 cores")
        assert run_key(RunConfig()) != first
    with monkeypatch.context() as patched:
        patched.setattr(machine, "versions", lambda: {**known, "torch": "99"})
        assert run_key(RunConfig()) != first
    with monkeypatch.context() as patched:
        patched.setattr(machine, "versions", lambda: {**known, "numpy": "99"})
        assert run_key(RunConfig()) == first  # decides nothing


def commit(folder, *files):
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    for name in files:
        subprocess.run(["git", "add", name], cwd=folder, check=True)
    words = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"]
    subprocess.run(words, cwd=folder, check=True)


def test_the_revision_is_that_of_a_repository_that_tracks_the_package(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "code.py").write_text("1")
    assert machine.git_revision(str(package)) is None
    commit(tmp_path, "package/code.py")
    machine.git_revision.cache_clear()
    found = machine.git_revision(str(package))
    assert (len(found["revision"]), found["dirty"]) == (40, False)
    (tmp_path / "results.csv").write_text("not ours")
    machine.git_revision.cache_clear()
    assert not machine.git_revision(str(package))["dirty"]
    (package / "code.py").write_text("2")
    machine.git_revision.cache_clear()
    assert machine.git_revision(str(package))["dirty"]


def test_a_wheel_inside_a_users_repository_has_no_revision(tmp_path):
    installed = tmp_path / ".venv" / "site-packages" / "selfspec_cli"
    installed.mkdir(parents=True)
    (installed / "code.py").write_text("1")
    (tmp_path / "theirs.py").write_text("1")
    commit(tmp_path, "theirs.py")
    assert machine.git_revision(str(installed)) is None
