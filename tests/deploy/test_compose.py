"""deploy/compose: the files for programs that read them, and the services as processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml

from prism.config.reader import convert
from prism.config.schema.access import KeysFile, hashed
from prism.config.schema.cluster_config import ServeYaml
from prism.queueing.server import get_binary_path
from tests.deploy.tools import DEPLOY, ROOT, call
from tests.frontend.tiny_model import make_model
from tests.ports import free_port
from tests.serve.conftest import Cluster, running, serve_command, until

COMPOSE = DEPLOY / "compose"
FILES = {path.stem: path for path in sorted(COMPOSE.glob("compose*.yaml"))}
MONITORING = ROOT / "examples" / "monitoring"
SOCKET = "/redis/redis.sock"


def read(path: Path) -> Any:
    """Returns a YAML file with the defaults of its variables."""
    return yaml.safe_load(re.sub(r"\$\{\w+:-(.*?)\}", r"\1", path.read_text()))


def services(stem: str = "compose") -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = read(FILES[stem])["services"]
    return found


def mounts(service: str) -> dict[str, str]:
    """Returns the source of each mount of a service, by its path in the container."""
    volumes = [each.split(":") for each in services()[service].get("volumes", [])]
    return {target: source for source, target, *_ in volumes}


@pytest.mark.slow
@pytest.mark.parametrize("stem", FILES)
def test_the_compose_specification_takes_the_files(stem: str) -> None:
    data = read(FILES[stem])
    assert call("compose_problem", data) == ""
    data["services"]["prism"]["shm-size"] = "4gb"
    assert "shm-size" in call("compose_problem", data)


def test_a_secret_that_no_file_defines_is_found() -> None:
    whole = read(FILES["compose"])
    used = [each for service in whole["services"].values() for each in service.get("secrets", [])]
    names = {each["source"] if isinstance(each, dict) else each for each in used}
    assert names == set(whole["secrets"])
    named = {target for each in services().values() for target in each.get("volumes", [])}
    volumes = {each.split(":")[0] for each in named if not each.startswith(".")}
    assert volumes == set(whole["volumes"])


def test_ports_are_on_the_loopback_address() -> None:
    published = [port for each in services().values() for port in each.get("ports", [])]
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published)


@pytest.mark.parametrize("service", services())
def test_services_have_few_rights(service: str) -> None:
    data = services()[service]
    assert data["read_only"]
    assert data["cap_drop"] == ["ALL"]
    assert data["security_opt"] == ["no-new-privileges:true"]


def test_images_are_pinned() -> None:
    images = {each["image"] for each in services().values()} - {"prism-serve:cpu"}
    assert len(images) == 3
    pinned = re.compile(r".+:v?\d+\.\d+\.\d+(-\w+)?")
    assert all(pinned.fullmatch(image) for image in images)


@pytest.mark.parametrize("service", services())
def test_mounted_files_exist(service: str) -> None:
    files = [source for source in mounts(service).values() if source.startswith(".")]
    assert all((COMPOSE / source).is_file() for source in files)
    build = services()[service].get("build")
    assert not build or (COMPOSE / build["context"] / build["dockerfile"]).is_file()


@pytest.mark.parametrize("file", ["prism.yaml", "prism.cuda.yaml"])
def test_the_configurations_are_ours(file: str) -> None:
    whole = convert(read(COMPOSE / file), ServeYaml)
    assert (whole.frontend.host, whole.frontend.port) == ("0.0.0.0", 8000)
    assert whole.redis == f"unix://{SOCKET}"
    [secret] = services()["prism"]["secrets"]
    assert whole.access.keys == f"/run/secrets/{secret['target']}"


def test_models_are_made_before_they_are_served() -> None:
    command = services()["models"]["command"]
    paths = [model.path for model in convert(read(COMPOSE / "prism.yaml"), ServeYaml).models]
    assert paths == [f"/models/{each}" for each in command if each not in {"--dir", "/models"}][1:]
    pulled = services("compose.cuda")["models"]["command"][1:]
    on_gpu = convert(read(COMPOSE / "prism.cuda.yaml"), ServeYaml).models
    assert [model.path for model in on_gpu] == pulled


def test_grafana_finds_the_board_and_prometheus() -> None:
    [provider] = read(COMPOSE / "grafana" / "dashboards.yaml")["providers"]
    home = services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(provider["options"]["path"])
    assert (COMPOSE / mounts("grafana")[home]).resolve() == MONITORING / "grafana.json"
    [source] = read(COMPOSE / "grafana" / "datasources.yaml")["datasources"]
    board = json.loads((MONITORING / "grafana.json").read_text())
    chosen = next(v for v in board["templating"]["list"] if v["type"] == "datasource")
    assert chosen["query"] == source["type"]
    assert source["url"] == "http://prometheus:9090"


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """Provides the folder that make-secrets writes."""
    script = shutil.copy(COMPOSE / "make-secrets", tmp_path)
    done = subprocess.run([script], capture_output=True, text=True, check=True)
    made = tmp_path / "secrets"
    assert done.stdout.strip() == (made / "client.key").read_text()
    assert subprocess.run([script], capture_output=True, check=False).returncode == 2
    return made


def test_the_secrets_are_what_is_mounted(secrets: Path) -> None:
    files = {Path(each["file"]).name for each in read(FILES["compose"])["secrets"].values()}
    assert files == {path.name for path in secrets.iterdir()} - {"client.key"}
    keys = convert(yaml.safe_load((secrets / "keys.yaml").read_text()), KeysFile).keys
    assert [(key.name, key.operator) for key in keys] == [("client", False), ("prometheus", True)]
    for key in keys:
        assert key.sha256 == hashed((secrets / f"{key.name}.key").read_text())
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    assert (secrets / "keys.yaml").stat().st_mode & stat.S_IROTH


@contextmanager
def redis_of_compose(folder: Path) -> Iterator[str]:
    """Runs the service's command by the bundled server. Yields the URL of its socket."""
    program, *arguments = services()["redis"]["command"]
    assert program == "redis-server"
    placed = [re.sub("^/redis", str(folder), each) for each in arguments]
    with running([str(get_binary_path()), *placed], folder / "redis.log", os.environ):
        until((folder / "redis.sock").exists, "the socket of Redis")
        yield f"unix://{folder}/redis.sock"


def test_redis_takes_its_settings(short_dir: Path) -> None:
    with redis_of_compose(short_dir) as url, redis.Redis.from_url(url) as client:
        assert client.ping()
        assert client.config_get("port") == {"port": "0"}
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        assert stat.S_IMODE((short_dir / "redis.sock").stat().st_mode) == 0o600
    check = services()["redis"]["healthcheck"]["test"]
    assert check == ["CMD", "redis-cli", "-s", SOCKET, "ping"]


def prometheus_yaml(folder: Path, secrets: Path, target: str) -> Path:
    """Writes the service's configuration with the paths and the address of this test."""
    text = (COMPOSE / "prometheus.yml").read_text()
    replaced = {
        "/etc/prometheus/alerts.yml": str(MONITORING / "alerts.yml"),
        "/run/secrets/prometheus.key": str(secrets / "prometheus.key"),
        "prism:8000": target,
        "10s": "1s",
    }
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    path = folder / "prometheus.yml"
    path.write_text(text)
    return path


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: Debian's prometheus")
def test_promtool_takes_the_configuration(tmp_path: Path, secrets: Path) -> None:
    path = prometheus_yaml(tmp_path, secrets, "prism:8000")

    def check() -> str:
        command = ["promtool", "check", "config", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr if done.returncode else ""

    assert check() == ""
    path.write_text(path.read_text().replace("authorization", "authorisation"))
    assert "authorisation" in check()


@contextmanager
def prism_of_compose(folder: Path, secrets: Path, url: str) -> Iterator[str]:
    """Runs prism-serve on compose's YAML, with the fake engine. Yields its address."""
    whole = read(COMPOSE / "prism.yaml")
    for model in whole["models"]:
        model["path"] = str(make_model(folder / model["name"]))
        model["context_length"] = 256
    whole["access"]["keys"] = str(secrets / "keys.yaml")
    whole["frontend"]["port"] = free_port()
    whole |= {"redis": url, "engine": {"adapter": "fake", "static": "1MiB"}}
    path, log = folder / "prism.yaml", folder / "serve.log"
    path.write_text(yaml.safe_dump(whole))
    environment = {**os.environ, "TMPDIR": str(folder)}
    with running([*serve_command(), "--config", str(path)], log, environment) as process:
        Cluster(process, folder, log).await_ready()
        yield f"127.0.0.1:{whole['frontend']['port']}"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus: Debian's package")
def test_prometheus_scrapes_prism_with_its_key(
    tmp_path: Path, short_dir: Path, secrets: Path
) -> None:
    with (
        redis_of_compose(short_dir) as url,
        prism_of_compose(short_dir, secrets, url) as address,
    ):
        base = f"http://{address}"
        headers = {"authorization": f"Bearer {(secrets / 'client.key').read_text()}"}
        body = {"model": "tiny-llama", "prompt": [9, 8, 7], "max_tokens": 4}
        assert httpx.post(f"{base}/v1/completions", json=body).status_code == 401
        answer = httpx.post(f"{base}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200
        assert httpx.get(f"{base}/metrics", headers=headers).status_code == 403
        path = prometheus_yaml(tmp_path, secrets, address)
        port = free_port()
        command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={tmp_path}/data"]
        command.append(f"--web.listen-address=127.0.0.1:{port}")
        with running(command, tmp_path / "prometheus.log", os.environ):
            asked = f'prism_requests_total{{model="tiny-llama",outcome="ok",instance="{address}"}}'
            until(lambda: value(port, asked) == 1, "the request is counted")
            assert value(port, 'up{job="prism"}') == 1
            rules = httpx.get(f"http://127.0.0.1:{port}/api/v1/rules").json()["data"]["groups"]
            assert len(rules[0]["rules"]) > 10


def value(port: int, query: str) -> float | None:
    """Returns the value of a query with one result. None before Prometheus has it."""
    try:
        url = f"http://127.0.0.1:{port}/api/v1/query"
        found = httpx.get(url, params={"query": query}).json()["data"]["result"]
    except (httpx.TransportError, KeyError, json.JSONDecodeError):
        time.sleep(0.2)
        return None
    return float(found[0]["value"][1]) if len(found) == 1 else None
