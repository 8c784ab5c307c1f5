"""Specifications of models for benchmarks."""

from __future__ import annotations

from pathlib import Path

from prism.messages.model_spec import ModelSpec
from prism.models.files import inspect_model


def spec_of(path: Path, context_length: int, dtype: str = "float32") -> ModelSpec:
    """Returns the specification of the model in a directory. Raises ConfigError for bad files.

    dtype: "auto" is the type of the files.
    """
    files = inspect_model(path, "--model")
    shape = files.shape(files.stored_dtype if dtype == "auto" else dtype, context_length)
    return ModelSpec(name=path.name, path=str(path), **shape, slo_ttft_s=1.0, slo_tpot_s=1.0)
