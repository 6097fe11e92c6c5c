"""The control layer: a gateway that chooses a backend for each request, streams, caches and shows what it won."""
