"""Configuration that the scheduler serves."""

from __future__ import annotations

from collections.abc import Set

from msgspec import structs

from prism.config.schema.cluster_config import ClusterConfig
from prism.messages.model_spec import ModelSpec


class ServedConfig:
    """Configuration that the scheduler serves. `cluster_reload.py` changes it."""

    def __init__(self, config: ClusterConfig) -> None:
        self.revision = -1  # oldest that the scheduler or a frontend uses; -1: not known yet
        self.serve(config)

    def serve(self, config: ClusterConfig) -> None:
        """Replaces the configuration."""
        self.config = structs.replace(config, models=[*config.models, *config.leaving])
        # Models that a reload removed but that have open requests; `config.models` includes them.
        self.leaving = {model.name for model in config.leaving}

    def staying(self) -> list[ModelSpec]:
        """Returns the models without those that leave."""
        return [model for model in self.config.models if model.name not in self.leaving]

    def remove(self, models: Set[str]) -> None:
        """Removes models that leave."""
        self.leaving -= models
        kept = [model for model in self.config.models if model.name not in models]
        self.config = structs.replace(self.config, models=kept)
