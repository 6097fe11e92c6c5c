"""One verb a file: each takes configs (and an engine) and returns rows."""
