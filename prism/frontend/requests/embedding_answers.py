"""Embeddings: which a model has, and their form in the answer."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Literal

import numpy as np

from prism.frontend.http.error_bodies import bad_request
from prism.messages.model_spec import ModelSpec


def check_able(model: ModelSpec, dimensions: int | None) -> None:
    """Raises BadRequestError if the model does not have embeddings of this size."""
    if model.embedding is None:
        text = f"model: {model.name} does not have embeddings; use an embedding model"
        raise bad_request(text, "model", "model_has_no_embeddings")
    if dimensions is not None and not model.embedding.may_have(dimensions):
        known = sorted({*model.embedding.dimensions, model.embedding.size})
        raise bad_request(
            f"dimensions: {dimensions} is not supported by {model.name}; give one of"
            f" {', '.join(map(str, known))}, or omit the field",
            "dimensions",
        )


def vector(embedding: bytes, dimensions: int | None, form: Literal["float", "base64"]) -> Any:
    """Returns the vector truncated to `dimensions`, normalized again, in the client's format."""
    values = np.frombuffer(embedding, "<f4")
    if dimensions is not None and dimensions < len(values):
        values = values[:dimensions]
        values = (values / (np.linalg.norm(values) or 1.0)).astype("<f4")
    return b64encode(values.tobytes()).decode() if form == "base64" else values.tolist()
