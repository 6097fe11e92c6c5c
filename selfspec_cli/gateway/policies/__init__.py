"""Policies by name: each file of this folder has one object `POLICY`; packages add theirs by an entry point of the
group `selfspec.gateway_policies`."""

from selfspec_cli.early_exit.registry import Registry
from selfspec_cli.gateway.policies.base import Policy

POLICIES: Registry[Policy] = Registry(
    "policy", Policy, "selfspec_cli.gateway.policies", "selfspec.gateway_policies", first="least_time"
)
