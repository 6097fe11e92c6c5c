"""Verbs: each takes configs (and an engine) and returns rows."""
