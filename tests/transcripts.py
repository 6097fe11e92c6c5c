"""What is kept of commands and servers: text without the folders of the machine that it was made on."""

import sys
import tempfile
from pathlib import Path


def without_folders(text):
    """VENV is the virtual environment, PYTHON the one below it, TMP temporary files, and . the checkout."""
    names = {sys.prefix: "VENV", sys.base_prefix: "PYTHON", tempfile.gettempdir(): "TMP", str(Path.cwd()): "."}
    for folder, name in names.items():
        text = text.replace(folder, name)
    return text
