"""Puts the lab book into the site while mkdocs builds it (`hooks` of mkdocs.yml)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
ON_THE_SITE = {"../results/LOG.md": "lab_book.md", "../../results/LOG.md": "../lab_book.md"}
"""Links that lead somewhere in the repository, too, and the page of the site that they lead to."""


def on_files(files: Files, *, config: Any) -> Files:
    """Make lab_book.md from the lab book."""
    lab_book = (ROOT / "results" / "LOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "lab_book.md", content=lab_book))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links that are for the repository lead to pages of the site."""
    for link, page in ON_THE_SITE.items():
        markdown = markdown.replace(f"]({link})", f"]({page})")
    return markdown
