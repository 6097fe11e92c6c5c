"""The formats of a report, apart from what writes them: the command line names them before anything is drawn."""

from enum import StrEnum


class Format(StrEnum):
    """What `selfspec report --format` writes; html is the page, the others go to stdout."""

    html = "html"
    md = "md"
    csv = "csv"
    json = "json"
