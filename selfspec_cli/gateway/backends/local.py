"""A server that selfspec starts, with the settings that were tuned; one that answers at `url` is adopted."""

from selfspec_cli.gateway.backends.base import BackendKind, check_serve, serve_command

BACKEND = BackendKind(
    "local", "a vLLM server started by `selfspec serve WORDS`, or adopted at url", check_serve, serve_command
)
