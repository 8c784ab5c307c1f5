"""What an engine is told of a model's files."""

from __future__ import annotations

from pathlib import Path

from prism.messages.models import ModelSpec
from prism.models.files import inspect_model


def spec_of(path: Path, context_length: int) -> ModelSpec:
    """In float32. ConfigError for bad files."""
    shape = inspect_model(path, "--model").shape("float32", context_length)
    return ModelSpec(name=path.name, path=str(path), **shape, slo_ttft_s=1.0, slo_tpot_s=1.0)
