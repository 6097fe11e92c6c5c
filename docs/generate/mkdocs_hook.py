"""Puts the lab book into the site while mkdocs builds it (`hooks` of mkdocs.yml), and takes out links that leave it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]


def on_files(files: Files, *, config: Any) -> Files:
    """Make lab_book.md from the lab book."""
    lab_book = (ROOT / "results" / "LOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "lab_book.md", content=lab_book))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Lead links to the lab book to its page, and leave only the words of links to other files of the repository."""
    up = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace(f"]({up}../results/LOG.md", f"]({up}lab_book.md")
    return re.sub(rf"\[([^\]]+)\]\({re.escape(up)}\.\./[^)]+\)", r"\1", markdown)
