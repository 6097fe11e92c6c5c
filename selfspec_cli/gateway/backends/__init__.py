"""Kinds of backends: each file here has one `BACKEND`, and packages add entry points of `selfspec.gateway_backends`."""

from selfspec_cli.early_exit.registry import Registry
from selfspec_cli.gateway.backends.base import BackendKind

BACKENDS: Registry[BackendKind] = Registry(
    "backend", BackendKind, "selfspec_cli.gateway.backends", "selfspec.gateway_backends", first="local"
)
