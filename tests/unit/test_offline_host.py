"""experiments/offline_host/: what travels arrives whole, jobs wait for what they use, and one lane is timed at a time.

No package index, no vLLM and no model: where a test runs the scripts, a program stands in for Python.
"""

import importlib.util
import lzma
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
from test_gpu_host import JOBS

from selfspec_cli.config import paths

FOLDER = paths.experiments_dir() / "offline_host"
ALONE = FOLDER / "alone"
MISSING = [tool for tool in ("bash", "tar", "xz", "flock", "setsid", "sha256sum") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(sys.platform != "linux" or bool(MISSING), reason=f"not Linux, or without {MISSING}")
PATIENCE = 30.0  # seconds until what should happen counts as not happening


def eventually(happens):
    end = time.monotonic() + PATIENCE
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)


# ---- lanes

FAKE = """
import time
from pathlib import Path
def run(began, go):
    Path(began).touch()
    while not Path(go).exists():
        time.sleep(0.01)
"""
COUNTING = "import sys, time\nwhile True: open(sys.argv[1], 'a').write('.'); time.sleep(0.005)"
CALLS = {
    "measure": [sys.executable, "-c", "import sys; from selfspec_cli.stages import measure as m; m.run(*sys.argv[1:])"],
    "clients": [sys.executable, "-c", "import sys; from selfspec_cli.engine.clients import run; run(*sys.argv[1:])"],
}
CALLS["a whole command"] = [sys.executable, str(ALONE / "lanes.py"), "alone", *CALLS["measure"]]


class Lanes:
    """Processes of lanes, with a package that stands in for selfspec_cli."""

    def __init__(self, folder):
        self.folder, self.started = folder, []
        (folder / "lanes").mkdir()
        for name in ("stages/measure", "engine/clients"):
            file = folder / "selfspec_cli" / f"{name}.py"
            file.parent.mkdir(parents=True)
            file.write_text(FAKE)
        (folder / "selfspec_cli" / "__init__.py").touch()

    def start(self, lane, *command):
        found = {"PYTHONPATH": f"{ALONE}:{self.folder}", "SELFSPEC_LANE": str(self.folder / "lanes" / lane)}
        self.started.append(subprocess.Popen(command, env=os.environ | found, cwd=self.folder, start_new_session=True))
        return self.started[-1]

    def time(self, lane, call="measure"):
        """Begins to time a lane, until there is a file `go-LANE`."""
        return self.start(lane, *CALLS[call], str(self.folder / f"began-{lane}"), str(self.folder / f"go-{lane}"))

    def is_timed(self, lane):
        return (self.folder / f"began-{lane}").exists()

    def count(self, lane):
        """Begins to count in another lane: a process whose environment does not name the lane, below one that does."""
        file = self.folder / f"count-{lane}"
        self.start(lane, "sh", "-c", 'env -i "$@"; true', "sh", sys.executable, "-c", COUNTING, str(file))
        eventually(file.exists)
        return lambda: file.stat().st_size

    def turns(self):
        return [line.split()[1] for line in (self.folder / "lanes" / "timed").read_text().splitlines()]

    def end(self):
        for process in self.started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def lanes(tmp_path):
    made = Lanes(tmp_path)
    yield made
    made.end()


def stands_still(count):
    time.sleep(0.05)
    before = count()
    time.sleep(0.15)
    return count() == before


def moves(count):
    before = count()
    eventually(lambda: count() > before)
    return True


@pytest.mark.parametrize("call", CALLS)
def test_while_a_lane_is_timed_the_others_stand_still(lanes, call):
    count = lanes.count("B")
    timed = lanes.time("A", call)
    eventually(lambda: lanes.is_timed("A"))
    assert stands_still(count)
    (lanes.folder / "go-A").touch()
    assert timed.wait(PATIENCE) == 0 and moves(count)
    assert lanes.turns() == ["A"]


def test_two_lanes_are_timed_one_after_the_other(lanes):
    first = lanes.time("A")
    eventually(lambda: lanes.is_timed("A"))
    second = lanes.time("B")
    time.sleep(0.3)
    assert not lanes.is_timed("B")
    (lanes.folder / "go-B").touch()
    (lanes.folder / "go-A").touch()
    assert first.wait(PATIENCE) == 0 and second.wait(PATIENCE) == 0
    assert lanes.turns() == ["A", "B"]


def released(folder):
    """What the scripts call."""
    return subprocess.run(["bash", "-c", f'. "{FOLDER}/common.sh"; lanes="{folder}/lanes"; release'],
                          env=os.environ | {"ROOT": str(folder / "root")}, check=False).returncode == 0  # fmt: skip


def test_lanes_go_on_after_a_timed_process_was_killed(lanes):
    count = lanes.count("B")
    timed = lanes.time("A")
    eventually(lambda: lanes.is_timed("A"))
    assert not released(lanes.folder) and stands_still(count)
    timed.kill()
    timed.wait()
    assert stands_still(count)
    assert released(lanes.folder) and moves(count)


def test_what_times_inside_of_a_turn_or_beside_it_shares_it(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("lanes", ALONE / "lanes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("SELFSPEC_LANE", str(tmp_path / "A"))
    met = threading.Barrier(2, timeout=PATIENCE)

    def ask():
        with module.alone(), module.alone():
            met.wait()

    beside = threading.Thread(target=ask)
    beside.start()
    ask()
    beside.join()
    assert len((tmp_path / "timed").read_text().splitlines()) == 1


# ---- what a job waits for

EVERY = {"site", "vllm"}
NEEDS = {
    "weights": ["host_time", "plain_fitted", "widened", "plain_widened"],
    "pieces": ["smollm2"],
    "smollm2": [
        "smollm2_draft",
        "copies",
        "orders",
        "ngram",
        "rivals",
        "one_request",
        "fitted",
        "trained",
        "profile_copies",
        "load_orders",
        "load_smollm2",
    ],
    "smollm2_draft": ["rivals"],
    "plain_widened": ["plain_one", "plain_fitted"],
    "frontend": ["load_rust", "load_rust_measured", "load_rust_long"],
    "reference_widened": ["widened_one", "load_alone", "load_widened", "load_128", "load_rust", "load_rust_measured",
                          "load_rust_long", "load_python_long",
                          "load_two_api_servers", "load_varying", "agree"],
}  # fmt: skip


@pytest.mark.parametrize("job", JOBS)
def test_a_job_waits_for_what_its_words_name(tmp_path, job):
    found = os.environ | {"ROOT": str(tmp_path)}
    said = subprocess.run([FOLDER / "lane.sh", "--needs", job], env=found, capture_output=True, text=True, check=True)
    assert set(said.stdout.split()) == EVERY | {step for step, jobs in NEEDS.items() if job in jobs}


def test_every_step_that_a_job_waits_for_is_one_of_prep():
    made = set(re.findall(r"^ *step (\w+) ", (FOLDER / "prep.sh").read_text(), re.M))
    assert EVERY | NEEDS.keys() <= made
    assert {job for jobs in NEEDS.values() for job in jobs} <= set(JOBS)


@pytest.mark.parametrize("job", ["nothing", "copies;", "selfspec", ""])
def test_a_lane_refuses_a_job_that_there_is_not(tmp_path, job):
    done = subprocess.run([FOLDER / "lane.sh", "A", "copies", job], env=os.environ | {"ROOT": str(tmp_path)},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 2 and f"{job}: no such job" in done.stderr
    assert not (tmp_path / "out" / "lane-A.log").exists()


# ---- the whole way

PYTHON = f"""#!{sys.executable}
import os, random, subprocess, sys
from pathlib import Path
from zipfile import ZipFile
words = sys.argv[1:]
after = {{word: words[place + 1] for place, word in enumerate(words[:-1])}}
def write(path, size=8):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(random.randbytes(size))
if any("zipfile" in word for word in words) or words[0].endswith("lanes.py"):
    sys.exit(subprocess.call([sys.executable, *words]))
elif "vllm==1.2.3" in words:
    ZipFile(Path(after["-d"]) / "vllm-1.2.3.whl", "w").writestr("vllm/vllm-rs", "front end")
elif "download" in words:
    for name in ("click", "pandas", "locust"):
        assert name in words
        write(f"{{after['-d']}}/{{name}}.whl", 300_000)
elif "wheel" in words:
    made = Path(after["-w"]) / "made.whl"
    made.parent.mkdir(parents=True, exist_ok=True)
    ZipFile(made, "w").writestr("selfspec-0.1.0.dist-info/entry_points.txt", "[x]")
elif "--pieces" in words:
    for number in range(3):
        write(f"{{after['--pieces']}}/gguf.{{number}}", 500_000)
elif "--target" in words:
    names = sorted(Path(word).name for word in words if word.endswith(".whl"))
    write(after["--target"] + "/" + "+".join(names))
elif "--join" in words:
    assert len(os.listdir(after["--join"])) == 3
for option in ("--out", "--widened"):
    for file in ("config.json", "int4/config.json", "model.safetensors.index.json") if option in after else ():
        write(f"{{after[option]}}/{{file}}")
with open(os.environ["RECORD"], "a") as record:
    print(os.environ.get("SELFSPEC_LANE"), os.environ.get("PYTHONPATH"), *words, file=record)
"""


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A small checkout, a folder for the host, and a program in the place of Python."""
    checkout, binary = tmp_path / "checkout", tmp_path / "bin" / "python3"
    (checkout / "experiments").mkdir(parents=True)
    shutil.copytree(FOLDER, checkout / "experiments" / "offline_host", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(FOLDER.parent / "gpu_host.sh", checkout / "experiments")
    for name in ("pyproject.toml", "README.md", "LICENSE", "selfspec_cli", ".hidden", "constraints-cpu.txt"):
        (checkout / name).touch()
    for name in ("model", "plain"):
        file = checkout / "experiments" / "reference_model" / name / "model.safetensors"
        file.parent.mkdir(parents=True)
        file.write_bytes(random.Random(0).randbytes(400_000))
    binary.parent.mkdir()
    binary.write_text(PYTHON)
    binary.chmod(0o755)
    for name, value in (("ROOT", "root"), ("RECORD", "record"), ("OUT", "back")):
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("WAIT", "100")
    monkeypatch.delenv("VLLM_BUNDLE", raising=False)
    return tmp_path


def script(host, name, *words):
    return subprocess.run([host / "checkout" / "experiments" / "offline_host" / f"{name}.sh", *words],
                          capture_output=True, text=True, check=False)  # fmt: skip


def packed(host, limit=1, *jobs):
    done = script(host, "pack", str(limit), *jobs)
    return done, sorted((host / "checkout" / ".pack").glob("[0-9]*"))


def test_every_upload_keeps_the_limit_and_all_together_are_the_manifest(host):
    done, folders = packed(host)
    assert done.returncode == 0 and "VLLM_BUNDLE names no folder" in done.stdout, done.stderr
    assert len(folders) == 4 and not (host / "checkout" / ".pack" / "new").exists()
    assert (host / "checkout" / ".pack" / ".gitignore").read_text() == "*\n"
    manifest = (host / "checkout" / ".pack" / "manifest.sha256").read_text()
    found = []
    for folder in folders:
        files = [file for file in folder.rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) <= 1 << 20
        assert (folder / "manifest.sha256").read_text() == manifest
        found += [str(file.relative_to(folder)) for file in files if file.name != "manifest.sha256"]
    assert sorted(found) == sorted(line.split()[1] for line in manifest.splitlines())
    assert "weights/model/model.safetensors.xz" in found and "wheels/selfspec-0.1.0.dist-info/entry_points.txt" in found
    assert (folders[0] / "weights").is_dir(), "what takes long to prepare goes first"


@pytest.mark.parametrize(
    ("jobs", "wanted"),
    [
        (["kernels"], set()),
        (["widened_one"], {"weights/model"}),
        (["plain_one"], {"weights/plain"}),
        (["plain_fitted"], {"weights/model", "weights/plain"}),
        (["attention", "rivals"], {"smollm2"}),
    ],
)
def test_only_weights_that_the_jobs_need_are_packed(host, jobs, wanted):
    done, folders = packed(host, 2, *jobs)
    assert done.returncode == 0, done.stderr
    found = {str(file.parent.relative_to(folder)) for folder in folders for file in folder.glob("*/**/*.*")}
    assert {place for place in found if not place.startswith("wheels")} == wanted


@pytest.mark.parametrize(("job", "comes"), [("load_rust", True), ("load_128", False)])
def test_a_bundle_gets_the_front_end_that_a_job_needs(host, monkeypatch, job, comes):
    (host / "bundle").mkdir()
    (host / "bundle" / "part-0").write_bytes(b"vLLM")
    monkeypatch.setenv("VLLM_BUNDLE", str(host / "bundle"))
    (host / "checkout" / "constraints-cpu.txt").write_text("torch==2\nvllm-cpu==1.2.3\n")
    done, folders = packed(host, 2, job)
    assert done.returncode == 0, done.stderr
    found = [file for folder in folders for file in folder.glob("frontend/*")]
    assert [file.name for file in found] == ["vllm-rs.xz"] * comes
    for file in found:
        assert lzma.decompress(file.read_bytes()) == b"front end"


def test_a_job_that_there_is_not_is_not_packed_for(host):
    done, folders = packed(host, 1, "nothing")
    assert done.returncode != 0 and not folders


def test_a_file_that_fits_into_no_upload_is_named(host):
    done, _ = packed(host, 0)
    assert done.returncode == 1 and "alone is larger than the limit" in done.stderr


@pytest.mark.slow
def test_what_came_is_made_ready_and_jobs_run_in_lanes(host, monkeypatch):
    _, folders = packed(host)
    kept, checkout, root = host / "kept", host / "checkout", host / "root"
    (checkout / ".pack").rename(kept)
    before = (checkout / "experiments" / "reference_model" / "model" / "model.safetensors").read_bytes()
    for name in ("model", "plain"):
        (checkout / "experiments" / "reference_model" / name / "model.safetensors").unlink()
    stage, state = root / "stage", root / "state"

    def upload(*numbers):
        shutil.rmtree(checkout / ".pack", ignore_errors=True)
        for number in numbers:
            shutil.copytree(kept / number, checkout / ".pack" / number)
        done = script(host, "take")
        assert done.returncode == 0 and not done.stderr, done.stderr

    monkeypatch.setenv("WAIT", "12")
    upload("1")
    assert sorted(path.name for path in stage.iterdir()) == ["manifest.sha256", "weights", "wheels"]
    said = script(host, "poll", "100")  # until what did not come is given up
    monkeypatch.setenv("WAIT", "100")
    made = {path.name for path in state.glob("[rf]*")}
    assert {"ready.tree", "ready.weights", "ready.reference_widened", "failed.pieces", "failed.smollm2"} <= made
    assert "smollm2: not made, because pieces is missing" in said.stdout
    tree = root / "tree"
    assert (tree / "experiments" / "reference_model" / "model" / "model.safetensors").read_bytes() == before
    assert not (tree / ".hidden").exists() and not (tree / ".pack").exists()

    changed = checkout / "experiments" / "gpu_host.sh"
    changed.write_text(changed.read_text() + "# changed")
    upload(*(folder.name for folder in folders[1:]))
    assert (tree / "experiments" / "gpu_host.sh").read_text() != changed.read_text()
    monkeypatch.setenv("RETREE", "1")
    upload(folders[-1].name)
    assert (tree / "experiments" / "gpu_host.sh").read_text() == changed.read_text()
    # A lane's jobs wait for what prep.sh still makes.
    assert script(host, "lane", "A", "ngram", "kernels").returncode == 0
    said = script(host, "poll", "100")
    assert not list(state.glob("failed.*")), said.stdout
    for words in ("ngram: exit code 0", "kernels: exit code 0", "lane A is done"):
        assert words in said.stdout
    lines = (host / "record").read_text().splitlines()
    (sweep,) = [line for line in lines if "speculative=ngram" in line]
    lane, path, *_ = sweep.split()
    assert lane == str(root / "out" / "lanes" / "A")
    assert path.split(":")[1:3] == [str(tree / "experiments/offline_host/alone"), str(root / "site")]
    assert (root / "out" / "lanes" / "timed").read_text().split()[1] == "A", "the job kernels is timed as a whole"
    assert [file.name for file in (root / "site").glob("*.whl")] == ["click.whl+locust.whl+made.whl+pandas.whl"]
    listed = subprocess.run(["tar", "tf", host / "back" / "out.tar.xz"], capture_output=True, text=True, check=True)
    assert {"./lane-A.log", "./ngram.log", "./prep-smollm2.log", "./lanes/timed"} <= set(listed.stdout.split())
