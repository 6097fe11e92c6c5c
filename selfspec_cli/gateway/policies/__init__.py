"""Policies: each file here has one `POLICY`, and packages add entry points of `selfspec.gateway_policies`."""

from selfspec_cli.early_exit.registry import Registry
from selfspec_cli.gateway.policies.base import Policy

POLICIES: Registry[Policy] = Registry(
    "policy", Policy, "selfspec_cli.gateway.policies", "selfspec.gateway_policies", first="least_time"
)
