"""The patch that docs/how_it_works.md proposes applies to the release of vLLM that it is written for."""

import subprocess
from pathlib import Path

import pytest
from vllm_source import sources

PATCH = Path(__file__).parents[2] / "docs" / "upstream" / "custom_class_v2.patch"
RELEASE = "0.33.0"


def test_the_patch_applies_to_the_source_of_the_release():
    folder = sources() / RELEASE
    if not (folder / "vllm" / "__init__.py").is_file():
        pytest.skip(f"vLLM {RELEASE} is not unpacked here: python tests/contract/vllm_source.py {RELEASE}")
    # Outside of a repository git compares with the files as they are.
    run = ["git", "-c", "safe.directory=*", "apply", "--check", "--verbose", str(PATCH)]
    done = subprocess.run(
        run,
        cwd=folder,
        env={"GIT_CEILING_DIRECTORIES": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Checking patch") == PATCH.read_text(encoding="utf-8").count("diff --git")
