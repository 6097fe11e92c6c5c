"""The patches in docs/upstream apply to the release of vLLM that they are written for."""

import subprocess
from pathlib import Path

import pytest
from vllm_source import sources

UPSTREAM = Path(__file__).parents[2] / "docs" / "upstream"
FIRST = "custom_class_v2.patch"
LATER = ("custom_class_batch_invariance.patch", "draft_length_policy.patch", "drafter_stats.patch")
"""Each goes on top of the first one, and of no other."""
RELEASE = "0.33.0"


@pytest.mark.parametrize("patches", [(FIRST,), *((FIRST, later) for later in LATER)], ids=lambda names: names[-1])
def test_a_patch_applies_to_the_source_of_the_release(patches):
    folder = sources() / RELEASE
    if not (folder / "vllm" / "__init__.py").is_file():
        pytest.skip(f"vLLM {RELEASE} is not unpacked here: python tests/contract/vllm_source.py {RELEASE}")
    whole = "".join((UPSTREAM / name).read_text(encoding="utf-8") for name in patches)
    # Outside of a repository git compares with the files as they are.
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "apply", "--check", "--verbose", "-"],
        input=whole,
        cwd=folder,
        env={"GIT_CEILING_DIRECTORIES": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Checking patch") == whole.count("diff --git")


def test_every_patch_is_named_on_its_page():
    page = (UPSTREAM / "next_pull_requests.md").read_text(encoding="utf-8")
    assert sorted(path.name for path in UPSTREAM.glob("*.patch")) == sorted((FIRST, *LATER))
    assert all(f"`{name}`" in page for name in (FIRST, *LATER))
