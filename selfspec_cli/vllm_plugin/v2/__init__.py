"""Drafting on vLLM's V2 model runner, which is what runs on CUDA."""
