"""A closed loop: each client asks again when its request has ended."""

from dataclasses import dataclass
from typing import Any

from selfspec_cli.early_exit.knobs import knob
from selfspec_cli.load_patterns.base import LoadPattern


@dataclass
class ClosedSettings:
    """How many clients ask."""

    clients: int | None = knob(
        None,
        help="clients of a closed loop, each of which asks again when its request has ended; with share, those that "
        "find the saturation",
        unit="clients",
        low=1,
        unset="8, where nothing else says how much to ask",
    )


class Closed(LoadPattern):
    name = "closed"
    help = "each client asks again when its request has ended (load.clients)"
    settings = ClosedSettings
    columns = ("clients",)
    rank = 0
    in_every_key = True

    def asked(self, load: Any) -> bool:
        return load.clients is not None

    def problem(self, load: Any) -> str | None:
        if load.requests is not None and load.requests < load.clients and load.share is None:
            return (
                f"load.requests={load.requests} with load.clients={load.clients}: fewer requests than clients; use "
                f"load.requests={load.clients} or more"
            )
        return None

    def values(self, load: Any) -> dict[str, Any]:
        return {"arrivals": self.name, "clients": load.clients}

    def label(self, row: Any) -> str:
        return f"{row.clients} client{'s' if row.clients > 1 else ''}"


PATTERN = Closed()
