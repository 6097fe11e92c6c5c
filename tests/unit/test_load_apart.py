"""locust replaces Python's sockets when it is imported, so no process of selfspec's own may import it."""

import subprocess
import sys
from pathlib import Path

MODULES = (
    "selfspec_cli.engine.clients",
    "selfspec_cli.stages.load",
    "selfspec_cli.commands.load",
    "selfspec_cli.commands.app",
)


def test_no_module_of_the_command_imports_locust_or_gevent():
    found = "sorted(name for name in sys.modules if name.startswith(('locust', 'gevent')))"
    code = f"import sys; import {', '.join(MODULES)}; print({found})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_file_that_locust_runs_is_imported_by_nobody():
    package = Path(__file__).parents[2] / "selfspec_cli"
    texts = {file: file.read_text() for file in package.rglob("*.py") if file.name != "locustfile.py"}
    assert not [file.name for file, text in texts.items() if "import locust" in text or "from locust" in text]
