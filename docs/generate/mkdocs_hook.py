"""Puts two pages into the site while mkdocs builds it (`hooks` of mkdocs.yml): all published figures, and the lab book."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LAB_BOOK = "../results/LOG.md"  # so that links lead somewhere in the repository, too


def on_files(files: Files, *, config: Any) -> Files:
    """Make figures.md, which in the repository says only how it is made, and lab_book.md from the lab book."""
    for folder in (ROOT, ROOT / "docs" / "generate"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    from doc_pages import page

    kept = files.get_file_from_path("figures.md")
    if kept is not None:
        files.remove(kept)
    files.append(File.generated(config, "figures.md", content=page()))
    lab_book = (ROOT / "results" / "LOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "lab_book.md", content=lab_book))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to the lab book's file lead to its page."""
    return markdown.replace(f"]({LAB_BOOK}", "](lab_book.md").replace(f"](../{LAB_BOOK}", "](../lab_book.md")
