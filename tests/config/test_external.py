"""External models in the YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from prism.config.reload import changes, reloaded
from prism.config.resolve import load
from prism.errors import ConfigError
from prism.messages.external import ExternalModel
from tests.frontend.tiny_model import make_model

CHAT: dict[str, Any] = {
    "name": "chat",
    "adapter": "external",
    "servers": ["http://127.0.0.1:30001/"],
}


def written(folder: Path, *models: dict[str, Any], **more: Any) -> Path:
    path = folder / "prism.yaml"
    path.write_text(yaml.safe_dump({"models": list(models), **more}))
    return path


@pytest.fixture
def own(tmp_path: Path) -> dict[str, Any]:
    """Returns a model that an engine serves."""
    return {"name": "own", "path": str(make_model(tmp_path / "own")), "adapter": "fake"}


def test_a_cluster_may_have_external_models_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("B_KEY", "sk-1234")
    second = {**CHAT, "name": "b", "servers": ["https://gpu-1:443"], "aliases": ["bulk"]}
    second |= {"slo": {"ttft": "1s", "tpot": "50ms"}, "server_key_variable": "B_KEY"}
    second["sleep_after"] = "5m"
    config = load(written(tmp_path, CHAT, second))
    assert (config.devices, config.models) == ([], [])
    assert config.names == ["chat", "b"]
    assert config.external == [
        ExternalModel("chat", ("http://127.0.0.1:30001",), 2.0, 0.2),
        ExternalModel("b", ("https://gpu-1:443",), 1.0, 0.05, ("bulk",), "B_KEY", 300.0),
    ]


def test_engines_serve_the_other_models(tmp_path: Path, own: dict[str, Any]) -> None:
    devices = [{"name": "host:0", "capacity": "64MiB", "page": "64KiB"}]
    config = load(written(tmp_path, own, CHAT, devices=devices, engine={"adapter": "fake"}))
    assert [model.name for model in config.models] == ["own"]
    assert [model.name for model in config.external] == ["chat"]


WRONG: dict[str, dict[str, Any]] = {
    "servers: is empty": {"servers": []},
    "servers[0]: 'localhost:30001' is not a server's URL": {"servers": ["localhost:30001"]},
    "servers[0]: 'http://a:99999' is not a server's URL": {"servers": ["http://a:99999"]},
    "servers[0]: 'http://u:p@a' is not a server's URL": {"servers": ["http://u:p@a"]},
    "servers[0]: 'http://a/v1' ends with /v1": {"servers": ["http://a/v1"]},
    "servers[0]: 'http://a..b' is not a server's URL": {"servers": ["http://a..b"]},
    "servers[0]: 'http://xn--' is not a server's URL": {"servers": ["http://xn--"]},
    "http://localhost:8000 is this cluster's own endpoint": {"servers": ["http://localhost:8000"]},
    "server_key_variable: the environment variable NO_KEY": {"server_key_variable": "NO_KEY"},
    "server_key_variable: the key in BAD_KEY has characters": {"server_key_variable": "BAD_KEY"},
    "the server http://a is given twice": {"servers": ["http://a", "http://a/"]},
    "path: an external model's own server decides that": {"path": "models/llama"},
    "context_length: an external model's own server": {"context_length": 512},
    "tp: an external model's own server decides that": {"tp": 2},
    "never_evict: an external model's own server": {"never_evict": True},
    "sleep_after: must be >= 1s": {"sleep_after": "900ms"},
    "name: '-' is not a valid name": {"name": "-"},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_mistake_is_named(tmp_path: Path, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAD_KEY", "sk-\nsecret")
    with pytest.raises(ConfigError) as raised:
        load(written(tmp_path, CHAT | WRONG[message]))
    assert message in str(raised.value)


def test_external_models_come_last(tmp_path: Path, own: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"models\[0\]: external models come last; move chat"):
        load(written(tmp_path, CHAT, own))


@pytest.mark.parametrize("key", ["servers", "server_key_variable", "sleep_after"])
def test_only_external_models_have_servers(tmp_path: Path, own: dict[str, Any], key: str) -> None:
    value = {"servers": ["http://a"], "server_key_variable": "KEY", "sleep_after": "5m"}[key]
    with pytest.raises(ConfigError, match=rf"models\[0\]\.{key}: needs adapter: external"):
        load(written(tmp_path, own | {key: value}))


def test_other_models_need_a_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\[0\]\.path: is missing; add it"):
        load(written(tmp_path, {"name": "own"}, devices=[{"name": "host:0", "capacity": "1GiB"}]))


def test_a_name_is_used_once(tmp_path: Path) -> None:
    other = {**CHAT, "servers": ["http://b"]}
    with pytest.raises(ConfigError, match=r"models\[1\].name: 'chat' is used twice"):
        load(written(tmp_path, CHAT, other))
    alias = {**other, "name": "b", "aliases": ["chat"]}
    with pytest.raises(ConfigError, match=r"models\[1\]: 'chat' is used twice"):
        load(written(tmp_path, CHAT, alias))


def test_a_reload_changes_them(tmp_path: Path) -> None:
    running = load(written(tmp_path, CHAT, {**CHAT, "name": "b", "servers": ["http://b"]}))
    moved = {**CHAT, "servers": ["http://c"]}
    loaded = load(written(tmp_path, moved, {**CHAT, "name": "d", "servers": ["http://d"]}))
    after = reloaded(running, loaded, ())
    assert after.external == loaded.external
    assert changes(running, after) == [
        "added external d",
        "removed external b",
        "changed external chat",
    ]
