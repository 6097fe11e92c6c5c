"""What the layers that draft attend with: one new token a request, over vLLM's paged KV cache."""
