"""Rows in; table, figure and page out. Nothing here measures, and nothing here starts an engine."""

from enum import StrEnum


class Format(StrEnum):
    """What `selfspec report --format` writes; html is the page, the others go to stdout."""

    html = "html"
    md = "md"
    csv = "csv"
    json = "json"
