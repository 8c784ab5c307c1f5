"""The YAML's policy: its name, and `knobs` of policies from other packages with their types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prism.config.reader import convert, suggestion
from prism.config.schema.cluster_config import ClusterConfig, ServeYaml
from prism.errors import ConfigError
from prism.policies import registry
from prism.policies.policy import Policy, PolicyKnobs


def own_knobs(policy: str, given: Mapping[str, Mapping[str, Any]]) -> PolicyKnobs | None:
    """Returns the knobs of `policy`, and checks those of all others. Raises ConfigError that names
    the key, such as knobs.NAME.KEY."""
    found = {name: _knobs(name, values) for name, values in given.items()}
    return found.get(policy)


def live_policy(config: ClusterConfig | ServeYaml) -> Policy:
    """Returns the policy that every process of the cluster runs. Raises ConfigError."""
    found = named_policy(config.policy)
    return registry.with_knobs(found, own_knobs(config.policy, config.knobs))


def named_policy(name: str) -> Policy:
    """Returns a policy as `registry.get` does. Raises ConfigError, which names a similar policy."""
    names = registry.names()
    if name not in names and (similar := suggestion(name, names)):
        raise ConfigError(f"policy: {name!r} is not a policy; {similar}")
    return registry.get(name)


def _knobs(name: str, values: Mapping[str, Any]) -> PolicyKnobs:
    if name not in registry.names():
        hint = suggestion(name, registry.names()) or "install its package"
        raise ConfigError(f"knobs.{name}: unknown policy; {hint}")
    kind = registry.get(name).knobs
    if kind is None:
        raise ConfigError(f"knobs.{name}: this policy does not have knobs; remove them")
    return convert(dict(values), kind, f"knobs.{name}")
