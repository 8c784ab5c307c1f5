"""A policy of an installed package runs a live cluster of fake engines, with its knobs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prism.engines.fake import expected_tokens
from tests.policies.installed import install_example
from tests.serve.conftest import serving


def test_the_example_serves_two_models_on_one_engine(
    tmp_path: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = install_example(tmp_path / "package")
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    changes = {
        "devices": [{"name": "host:0", "capacity": "16MiB", "page": "64KiB", "engines": 1}],
        "policy": "least-loaded",
        "knobs": {"least-loaded": {"keep_s": 0.2}},
        "scheduler": {"interval": "500ms"},
        "journal": {"keep": "decisions"},
    }
    folder = tmp_path / "cluster"
    folder.mkdir()
    with serving(folder, short_dir, **changes) as cluster:
        for model in ("a", "b", "a"):
            answer = cluster.post(model, return_token_ids=True, ignore_eos=True).json()
            assert answer["choices"][0]["token_ids"] == expected_tokens([9, 8, 7], 12)
    journal = "".join(path.read_text() for path in (folder / "logs").rglob("*cluster*"))
    for reason in ("the device has 0 requests", "; b waits", "; a waits"):
        assert reason in journal
