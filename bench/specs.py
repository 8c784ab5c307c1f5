"""What an engine is told of a model's files."""

from __future__ import annotations

from pathlib import Path

from prism.messages.models import ModelSpec
from prism.models.files import inspect_model


def spec_of(path: Path, context_length: int, dtype: str = "float32") -> ModelSpec:
    """`dtype` "auto": as the files are. ConfigError for bad files."""
    files = inspect_model(path, "--model")
    shape = files.shape(files.stored_dtype if dtype == "auto" else dtype, context_length)
    return ModelSpec(name=path.name, path=str(path), **shape, slo_ttft_s=1.0, slo_tpot_s=1.0)
