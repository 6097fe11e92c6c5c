"""What tests of hostile clients and backends have in common."""

import asyncio
import hashlib

from fake import answer

from selfspec_cli.gateway.settings import KeySettings

PROMPT = {"model": "toy", "prompt": "once upon", "max_tokens": 8, "temperature": 0}
WANTED = answer("once upon", 8)
TENANTS = [
    KeySettings(name=name, key=hashlib.sha256(name.encode()).hexdigest(), admin=name == "ann")
    for name in ("ann", "bob")
]
ANN, BOB = {"Authorization": "Bearer ann"}, {"Authorization": "Bearer bob"}


async def until(condition):
    """Wait for it; the test's own limit of a minute ends what never comes."""
    while not condition():
        await asyncio.sleep(0.02)
