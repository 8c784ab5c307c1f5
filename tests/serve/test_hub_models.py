"""Models by a hub's name in a real cluster: downloaded at the start, and served from the cache."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.frontend.tiny_model import make_model
from tests.models.hub_server import Hub, commit_of, files_of
from tests.models.hub_server import serving as serving_hub
from tests.serve.conftest import SERVE, serving, write_yaml
from tests.sglang.models import LLAMA, path_of

NAME, TOKEN = "org/tiny", "hf_NeverToBeWritten0123456789"
MODELS = [{"name": "a", "path": NAME}]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serves `NAME`, for which a token is needed, to children of this process."""
    made = Hub()
    made.gated.add(NAME)
    made.tokens.add(TOKEN)
    made.add(NAME, files_of(make_model(tmp_path / "source")))
    with serving_hub(made):
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield made


def check(folder: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    path = write_yaml(folder, models=MODELS, **changes)
    command = [*SERVE, "check", "--config", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_check_downloads_nothing(hub: Hub, tmp_path: Path) -> None:
    done = check(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {tmp_path}/prism.yaml: models[0].path: {tmp_path}/org/tiny is not a directory, and"
        f" {NAME} is not in the cache {tmp_path}/hf/hub; run prism-models pull {NAME}\n"
    )
    make_model(tmp_path / "org" / "tiny")
    assert check(tmp_path).returncode == 0
    assert hub.requests == []


def test_a_start_that_cannot_download_is_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.tokens.clear()
    path = write_yaml(tmp_path, models=MODELS)
    command = [*SERVE, "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(
        f"and {hub.url} rejects the token (401); set HF_TOKEN to a valid one\n"
    )
    hub.statuses["api"] = 503
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: models[0].path: {NAME}: {hub.url} answered 503; try again later\n"
    )


def test_a_start_downloads_and_a_reload_keeps_the_commit(
    hub: Hub, tmp_path: Path, short_dir: Path
) -> None:
    files = hub.repos[NAME]["main"]
    with serving(tmp_path, short_dir, models=MODELS) as cluster:
        assert f"{NAME}: downloading 0.0 MB in 4 files from {hub.url}" in cluster.output()
        answer = cluster.post().json()
        assert answer["usage"]["completion_tokens"] == 12
        hub.requests.clear()
        checked = check(tmp_path)
        folder = tmp_path / "hf" / "hub" / "models--org--tiny" / "snapshots" / commit_of(files)
        assert f"a: {NAME} in {folder}" in checked.stdout
        assert hub.requests == []
        hub.add(NAME, {**files, "generation_config.json": b"{}"})
        pull = [sys.executable, "-m", "prism.cli.models", "pull", NAME]
        subprocess.run(pull, check=True, capture_output=True, timeout=60)
        shown = cluster.operate("reload")
        assert shown.stdout == "reloaded: nothing has changed\n", shown.stderr
        path = cluster.log.parent / "prism.yaml"
        data = yaml.safe_load(path.read_text())
        data["models"][0]["slo"] = {"ttft": "3s"}
        data["models"].append({"name": "n", "path": "org/none"})
        path.write_text(yaml.safe_dump(data))
        assert "org/none is not in the cache" in cluster.operate("reload").stderr
        data["models"].pop()
        path.write_text(yaml.safe_dump(data))
        assert "a.slo.ttft" in cluster.operate("reload").stdout
        assert cluster.stop() == 0
    written = [p for p in (tmp_path, *tmp_path.rglob("*")) if p.is_file() and TOKEN in text_of(p)]
    assert written == []


def text_of(path: Path) -> str:
    return path.read_text(errors="replace")


@pytest.mark.sglang
def test_a_real_engine_loads_a_snapshot(hub: Hub, tmp_path: Path, short_dir: Path) -> None:
    hub.add(NAME, files_of(path_of(LLAMA)))
    device = {"name": "host:0", "capacity": "192MiB", "page": "64KiB", "engines": 1}
    engine = {"adapter": "sglang"}
    with serving(tmp_path, short_dir, models=MODELS, devices=[device], engine=engine) as cluster:
        answer = cluster.post(temperature=0).json()
        assert answer["usage"]["completion_tokens"] == 12
