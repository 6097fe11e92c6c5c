"""Where the contract tests find the Python files of a release of vLLM, installed here or not.

    python tests/contract/vllm_source.py [0.33.0] [--runnable]

downloads that release's wheel with pip (340 MB) and unpacks its Python files (50 MB) to where the contract tests look
for them: $SELFSPEC_VLLM_SOURCES, or ~/.cache/selfspec/vllm-sources; each release in a folder of its name. Without a
release it does so for every supported one that is not here yet, which `make test` and `make quick` do first. Where
there is no package index, what needs the files is skipped.

--runnable makes a folder of one release that runs on a CPU, and prints its path, which belongs first on PYTHONPATH:
these files with the compiled extension of the vLLM that is installed. A release without a build for CPUs runs the tests
of the V2 model runner this way (`make v2-on RELEASE=0.33.0`), if it calls the operators as the installed one does."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from selfspec_cli.vllm_plugin import releases
from selfspec_cli.vllm_plugin.releases import admission
from selfspec_cli.vllm_plugin.releases.admission import assigned_on_self as assigned_on_self

VARIABLE = "SELFSPEC_VLLM_SOURCES"

V1_PROPOSER = "vllm.v1.spec_decode.draft_model:DraftModelProposer"
V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:TargetDependentARSpeculator"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
WORKER = "vllm.v1.worker.gpu_worker:Worker"


class Source(admission.Source):
    """What only tests ask of a vLLM that is read as text."""

    def segment(self, target: str) -> str:
        """The source of one class or function."""
        node = self.find(target)
        assert node is not None, f"there is no {target}"
        return ast.unparse(node)


def sources() -> Path:
    """The folder that holds one folder a release."""
    return Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "selfspec" / "vllm-sources")


def folder_of(release: str) -> Path | None:
    """The folder that holds the package `vllm` of `release`: the installed one, or an unpacked one; None if neither."""
    found, spec = releases.installed(), importlib.util.find_spec("vllm")
    if found is not None and found[1].partition("+")[0] == release and spec is not None and spec.origin:
        return Path(spec.origin).parents[1]
    unpacked = sources() / release
    return unpacked if (unpacked / "vllm" / "__init__.py").is_file() else None


def fetch(release: str) -> Path:
    """Unpack the Python files of vLLM's wheel of `release`; returns their folder. Needs pip and a package index."""
    place = sources() / release
    with tempfile.TemporaryDirectory() as scratch:
        wanted = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", scratch, f"vllm=={release}"]
        subprocess.run([sys.executable, "-m", "pip", "download", *wanted], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place, [name for name in archive.namelist() if name.endswith(".py")])
    return place


def runnable(release: str) -> Path:
    """A folder with `release`, the installed vLLM's compiled extension, and metadata that name a build for CPUs."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None, "no vLLM is installed whose compiled extension could be used"
    place = sources() / f"{release}-runnable"
    if not place.is_dir():
        shutil.copytree((folder_of(release) or fetch(release)) / "vllm", place / "vllm")
    for library in Path(spec.origin).parent.glob("*.so"):
        link = place / "vllm" / library.name
        link.unlink(missing_ok=True)
        link.symlink_to(library)
    metadata = place / f"vllm-{release}+cpu.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
    return place


def fetch_missing() -> None:
    """Unpack every supported release that is neither installed nor unpacked; where that cannot be had, say so."""
    for release in [each.release for each in releases.SUPPORTED if folder_of(each.release) is None]:
        try:
            print(f"vLLM {release} was unpacked to {fetch(release)}")
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"vLLM {release} cannot be had, so its tests are skipped: {error}")


if __name__ == "__main__":
    asked = [word for word in sys.argv[1:] if word != "--runnable"]
    prepare = runnable if "--runnable" in sys.argv else fetch
    print(prepare(asked[0])) if asked else fetch_missing()
