"""The same model in fewer bits: a server started by selfspec, whose answers are not those of the unchanged model.

It therefore never continues a stream of a backend with full weights, nor the other way round.
"""

from selfspec_cli.config.schema import ConfigError
from selfspec_cli.gateway.backends.base import BackendKind, check_serve, serve_command
from selfspec_cli.gateway.settings import BackendSettings


def check(settings: BackendSettings) -> None:
    """Raises ConfigError where nothing says how the weights are quantised, or which quantised model it is."""
    check_serve(settings)
    named = [word for word in settings.words if word.startswith(("model=", "model.quantization=", "model.path="))]
    if settings.url is None and not named:
        remedy = "give model.quantization=fp8, or model=FOLDER of a quantised checkpoint"
        raise ConfigError(f"backend {settings.name}: words say nothing of fewer bits: {remedy}")


BACKEND = BackendKind(
    "quantised",
    "the same model in fewer bits, started by `selfspec serve WORDS` or adopted at url",
    check,
    serve_command,
    changes_weights=True,
)
