"""Any address with the OpenAI API, with a price and a key from the environment; it need not be vLLM."""

from selfspec_cli.gateway.backends.base import BackendKind, need_url

BACKEND = BackendKind("openai", "any address with the OpenAI API", need_url, vllm=False)
