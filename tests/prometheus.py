"""A real Prometheus with a configuration of `infra/prometheus`, and the queries of a dashboard of `infra/grafana`."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from selfspec_cli.engine.server import free_port

INFRA = Path(__file__).resolve().parents[1] / "infra"
WINDOW = "10m"  # of a rate; Grafana puts in one that fits its own zoom


def queries(dashboard: str) -> list[str]:
    """Every query of every panel, with what Grafana would put in for its variables."""
    panels = json.loads((INFRA / "grafana" / dashboard).read_text(encoding="utf-8"))["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return [query.replace("$__rate_interval", WINDOW).replace("$model_name", ".*") for query in found]


@contextmanager
def prometheus(configuration: str, url: str, folder: Path) -> Iterator[Callable[..., Any]]:
    """Our own configuration, over this server and every two seconds; yields what asks Prometheus's HTTP API, which
    raises an error of httpx while it starts."""
    text = (INFRA / "prometheus" / configuration).read_text(encoding="utf-8")
    for setting, here in ((r"localhost:\d+", url.removeprefix("http://")), ("15s", "2s")):
        text, count = re.subn(setting, here, text)
        assert count, setting
    (folder / "prometheus.yml").write_text(text, encoding="utf-8")
    shutil.copy(INFRA / "prometheus" / "alerts.yml", folder)
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]

    def ask(query: str | None, what: str = "query") -> Any:
        parameters = {} if query is None else {"query": query}
        reply = httpx.get(f"http://127.0.0.1:{port}/api/v1/{what}", params=parameters)
        if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE:  # it is starting
            reply.raise_for_status()
        answer = reply.json()
        assert answer["status"] == "success", (query, answer)
        return answer["data"]

    with open(folder / "prometheus.log", "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        yield ask
    finally:
        process.terminate()
        process.wait(60)
