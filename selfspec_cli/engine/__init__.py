"""A live vLLM engine, and a config as its arguments."""
