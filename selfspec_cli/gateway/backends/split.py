"""Prefill on one server, decode on another, joined by vLLM's KV connector (NIXL, or the example connector on one host).

The gateway asks the server at `prefill` for one token, and the one at `url` for the answer, with what the first said of
where its keys and values are. Drafts are made where it decodes; the server that prefills needs none.
"""

from typing import Any

from selfspec_cli.gateway.backends.base import BackendKind, check_use, need_address, without_v1
from selfspec_cli.gateway.request import CHAT, COMPLETIONS
from selfspec_cli.gateway.settings import BackendSettings
from selfspec_cli.gateway.wire import BrokenStream, loads

_UNKNOWN = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
REMOTE = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(_UNKNOWN)}
_OF_THE_ANSWER = ("stream_options", "min_tokens", "return_token_ids", "logprobs", "top_logprobs", "n", "vllm_xargs")


def check(settings: BackendSettings) -> None:
    """Raises ConfigError where one of the two addresses is missing."""
    check_use(settings, "prefill")
    need_address(settings, "url", settings.url)
    need_address(settings, "prefill", settings.prefill)


async def prefilled(upstream: Any, replica: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body for the server that decodes, once the other one has prefilled the prompt. Raises BackendFailed,
    BrokenStream or Refused where it did not."""
    if path not in (CHAT, COMPLETIONS):  # an embedding is prefill alone
        return body
    first = {name: value for name, value in body.items() if name not in _OF_THE_ANSWER}
    first |= {"stream": False, "max_tokens": 1, "kv_transfer_params": REMOTE}
    if "max_completion_tokens" in first:
        first["max_completion_tokens"] = 1
    base = without_v1(replica.settings.prefill)
    async with upstream.post(replica, path, first, {}, base=base) as response:
        raw = await upstream.whole(response, upstream.limits.first_byte_seconds)
    try:
        where = loads(raw).get("kv_transfer_params")
    except (ValueError, AttributeError) as error:
        raise BrokenStream("what came from the server that prefills is no answer") from error
    return {**body, "kv_transfer_params": where} if where else body


BACKEND = BackendKind("split", "prefill on the server at prefill, decode on the one at url", check, before=prefilled)
