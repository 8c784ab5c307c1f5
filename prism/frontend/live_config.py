"""Configuration in use by a frontend."""

from __future__ import annotations

from dataclasses import dataclass

from prism.config.schema.cluster_config import ClusterConfig


@dataclass(slots=True)
class LiveConfig:
    """Configuration in use, of which parts of the frontend read the current settings. Only
    `config_watcher` replaces it."""

    config: ClusterConfig
