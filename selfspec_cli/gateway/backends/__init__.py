"""Kinds of backends by name: each file of this folder has one object `BACKEND`; packages add theirs by an entry point
of the group `selfspec.gateway_backends`."""

from selfspec_cli.early_exit.registry import Registry
from selfspec_cli.gateway.backends.base import BackendKind

BACKENDS: Registry[BackendKind] = Registry(
    "backend", BackendKind, "selfspec_cli.gateway.backends", "selfspec.gateway_backends", first="local"
)
