"""An embedding model and a generating one under `prism-serve`."""

from __future__ import annotations

import base64
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np

from prism.engines.fake import expected_embedding
from tests.config.test_embeddings import make_embedding_model
from tests.serve.conftest import serving

SIZE = 32  # of the tiny model


def test_it_is_brought_up_and_answers_beside_another_model(tmp_path: Path) -> None:
    make_embedding_model(tmp_path / "vectors")
    models = [{"name": "v", "path": "vectors"}, {"name": "a", "path": "a"}]
    inputs = [[number, 7, 9] for number in range(40)]
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(tmp_path, Path(temporary), models=models) as cluster,
    ):
        assert "/v1/embeddings -H" in cluster.output()
        body = {"model": "v", "input": inputs, "encoding_format": "base64"}
        got = httpx.post(f"{cluster.url}/v1/embeddings", json=body, timeout=60)
        assert got.status_code == 200, got.text
        for each, ids in zip(got.json()["data"], inputs, strict=True):
            found = np.frombuffer(base64.b64decode(each["embedding"]), "<f4")
            assert np.array_equal(found, expected_embedding(ids, SIZE))
        assert cluster.post("a").status_code == 200
        assert cluster.post("v").status_code == 400
