"""Drafting on vLLM's V1 model runner, which is what runs on the CPU."""
