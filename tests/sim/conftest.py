"""A small cluster's YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.command import CONFIG


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CONFIG)
    return path
