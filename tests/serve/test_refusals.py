"""Models without a place, in a real cluster of fake engines.

The error tells the client the reason and when to retry.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.serve.conftest import Cluster, serving

DEVICES = [
    {"name": name, "capacity": "16MiB", "page": "64KiB", "engines": 2}
    for name in ("host:0", "host:1")
]
MODELS = [
    {"name": "a", "path": "a", "device": "host:0", "never_evict": True},
    {"name": "large", "path": "b", "device": "host:0"},  # next to a
    {"name": "bad", "path": "b", "device": "host:1"},
    {"name": "deadly", "path": "b", "device": "host:1"},  # kills every engine that takes it
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(
            tmp_path_factory.mktemp("refusals"),
            Path(temporary),
            json.dumps({"fail_activation": ["bad"], "die_in_activation": ["deadly"]}),
            devices=DEVICES,
            models=MODELS,
            engine={"adapter": "fake", "static": "10MiB", "drain_timeout": "10s"},
            frontend={"port": 0, "refused_timeout": "1s"},
        ) as made,
    ):
        yield made


@pytest.mark.parametrize(
    ("model", "why"),
    [("large", "missing on host:0"), ("bad", "PRISM_FAKE"), ("deadly", "died")],
)
def test_a_request_for_it_is_answered(cluster: Cluster, model: str, why: str) -> None:
    response = cluster.post(model)
    assert response.status_code == 503, response.text
    assert int(response.headers["retry-after"]) > 0
    error = response.json()["error"]
    assert error["code"] == "model_unavailable"
    assert why in error["message"]
    assert cluster.post("a").status_code == 200


def test_a_model_that_cannot_be_loaded_is_answered_at_once(tmp_path: Path, short_dir: Path) -> None:
    """Answers before `frontend.refused_timeout`, which is a minute here."""
    fake = json.dumps({"fail_activation": ["b"]})
    with serving(tmp_path, short_dir, fake) as cluster:
        for _ in range(3):
            began_s = time.monotonic()
            response = cluster.post("b")
            assert time.monotonic() - began_s < 15
            assert response.status_code == 503
            error = response.json()["error"]
            assert error["code"] == "model_unavailable"
            assert error["message"].startswith("b cannot be loaded: PRISM_FAKE")
        assert cluster.post("a").status_code == 200
