"""Puts the page of all published figures into the site while mkdocs builds it (`hooks` of mkdocs.yml)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]


def on_files(files: Files, *, config: Any) -> Files:
    """Make figures.md, which in the repository says only how it is made."""
    for folder in (ROOT, ROOT / "docs" / "generate"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    from doc_pages import page

    kept = files.get_file_from_path("figures.md")
    if kept is not None:
        files.remove(kept)
    files.append(File.generated(config, "figures.md", content=page()))
    return files
