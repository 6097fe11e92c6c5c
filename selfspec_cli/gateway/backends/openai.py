"""Any address with the OpenAI API, with a price and a key from the environment; it need not be vLLM.

One with another path than /v1 is taken as it is; one without /v1/models can be used where `model` is named.
"""

from selfspec_cli.gateway.backends.base import BackendKind, check_use, need_address
from selfspec_cli.gateway.settings import BackendSettings


def check(settings: BackendSettings) -> None:
    """Raises ConfigError where no address is given."""
    check_use(settings)
    need_address(settings, "url", settings.url, query=True)


BACKEND = BackendKind("openai", "any address with the OpenAI API", check, vllm=False)
