"""What every test process needs to know before vLLM is imported."""

import os

# vLLM's engine in the test's own process: one process fewer, and errors keep their type.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reaches for the network is a mistake

# One thread: tiny models gain nothing from two, and two threads on cores that are shared wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
