"""`frontend.admin`: the operators' pages on a separate socket."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import yaml

from prism.config.schema.admin import admin_address, host_and_port
from prism.errors import ConfigError
from prism.frontend.http.listener import admin_listener, bound_address
from prism_replay.results import ReplayResults, read_results
from prism_replay.trace import write_trace
from tests.replay.records import a_request
from tests.serve.conftest import SERVE, STOP_S, Cluster, serving, until, write_yaml
from tests.serve.test_access import new_key

PAGES = ("/status", "/metrics", "/dashboard/")


def local(path: Path) -> httpx.Client:
    return httpx.Client(base_url="http://localhost", transport=httpx.HTTPTransport(uds=str(path)))


def key_of(folder: Path, name: str, *options: str) -> dict[str, str]:
    made = new_key(name, "--keys", str(folder / "keys.yaml"), *options)
    assert made.returncode == 0, made.stderr
    return {"Authorization": f"Bearer {made.stdout.strip()}"}


def statuses(client: httpx.Client, **more: Any) -> list[int]:
    return [client.get(page, **more).status_code for page in PAGES]


def frontends(client: httpx.Client, **more: Any) -> set[str]:
    """Returns the ids of the frontends on the metrics page."""
    return set(re.findall(r'frontend="([^"]+)"', client.get("/metrics", **more).text))


def replayed(
    folder: Path, cluster: Cluster, key: dict[str, str], *options: str
) -> tuple[ReplayResults, str]:
    """Returns the results of `prism-replay run` with a header's key, and its stderr."""
    trace, out = folder / "trace.jsonl", folder / "run.json"
    write_trace(trace, [a_request(0.1 * number, "a") for number in range(3)])
    command = [sys.executable, "-m", "prism_replay.cli.replay", "run", str(trace), "--strict"]
    command += ["--url", cluster.url, "--out", str(out), "--token-ids", "1-9", *options]
    variables = {**os.environ, "OPENAI_API_KEY": key["Authorization"].removeprefix("Bearer ")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=variables
    )
    assert done.returncode == 0, done.stderr
    unread = "counters: /status needs an operator's key, and --status-url if frontend.admin is set"
    results = read_results(out)
    assert (unread in done.stdout) == (results.counters is None)
    return results, done.stderr


def test_a_port_of_its_own_wants_an_operators_key(tmp_path: Path) -> None:
    """Keeps both ports open while frontends are replaced."""
    operator, alice = key_of(tmp_path, "op", "--operator"), key_of(tmp_path, "alice")
    settings = {"port": 0, "admin": "127.0.0.1:0", "processes": 2}
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(
            tmp_path, Path(temporary), frontend=settings, access={"keys": "keys.yaml"}
        ) as cluster,
    ):
        address = json.loads((cluster.run_dir / "cluster.json").read_text())["admin"]
        line = f"watch:  http://{address}/dashboard"
        until(lambda: line in cluster.output(), "the console names the page")
        with (
            httpx.Client(base_url=f"http://{address}") as admin,
            httpx.Client(base_url=cluster.url) as public,
        ):
            assert statuses(admin, headers=operator) == [200, 200, 200]
            assert statuses(admin, headers=alice) == [403, 403, 403]
            assert statuses(admin) == [401, 401, 401]
            assert frontends(admin, headers=operator) == {"f0.1", "f1.1"}
            assert admin.get("/health").status_code == 200
            assert admin.get("/v1/models", headers=operator).status_code == 404
            assert statuses(public, headers=operator) == [404, 404, 404]
            assert public.get("/health").status_code == 200
            served = [
                model["id"] for model in public.get("/v1/models", headers=alice).json()["data"]
            ]
            assert served == ["a", "b"]
            assert set(public.get("/openapi.json").json()["paths"]).isdisjoint(PAGES)
        shown = ("--status-url", f"http://{address}")
        found, warnings = replayed(tmp_path, cluster, operator, *shown)
        assert "host:0" in found.samples[-1].devices
        assert warnings == ""
        found, warnings = replayed(tmp_path, cluster, operator)
        assert (found.samples, warnings) == ([], "")
        found, warnings = replayed(tmp_path, cluster, alice, *shown)
        assert found.samples == []
        assert warnings == (
            f"warning: --status-url http://{address}: the server did not accept the API key (status"
            " 403); give an operator's with --api-key or in $OPENAI_API_KEY\n"
        )
        assert cluster.operate("replace-frontends").returncode == 0

        def replaced() -> bool:
            with httpx.Client(base_url=f"http://{address}", headers=operator) as client:
                return frontends(client) == {"f0.2", "f1.2"}

        until(replaced, "the new frontends are the only ones", 60)
        with httpx.Client(base_url=cluster.url, headers=alice) as public:
            body = {"model": "a", "prompt": [9, 8], "max_tokens": 4}
            assert public.post("/v1/completions", json=body).status_code == 200


def test_a_unix_socket_is_this_users_alone(tmp_path: Path, short_dir: Path) -> None:
    """Needs no key, and replaces the socket of a killed cluster but not that of a running one."""
    alice = key_of(tmp_path, "alice")
    path = short_dir / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    settings = {"port": 0, "admin": str(path)}
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(
            tmp_path, Path(temporary), frontend=settings, access={"keys": "keys.yaml"}
        ) as cluster,
    ):
        assert path.stat().st_mode & 0o777 == 0o600
        with local(path) as admin, httpx.Client(base_url=cluster.url) as public:
            assert statuses(admin) == [200, 200, 200]
            assert statuses(public) == [401, 401, 401]
            reloads(cluster, tmp_path / "prism.yaml", admin)
        found, warnings = replayed(tmp_path, cluster, alice, "--status-url", f"unix:{path}")
        assert "host:0" in found.samples[-1].devices
        assert warnings == ""
        assert check(tmp_path, cluster.temporary).returncode == 0, "the file of one that runs"
        taken = check(tmp_path, short_dir)
        assert taken.returncode == 2
        assert f"frontend.admin: cannot listen on {path}: Address already in use" in taken.stderr
        assert cluster.operate("down").returncode == 0
        assert cluster.process.wait(STOP_S) == 0
        assert not path.exists()


def reloads(cluster: Cluster, path: Path, admin: httpx.Client) -> None:
    """Checks that POST /reload does the same as the command.

    A mistake changes nothing. The API does not have this route.
    """
    good = path.read_text()
    data = yaml.safe_load(good)
    data["models"][0]["slo"] = {"ttft": "7s"}
    path.write_text(yaml.safe_dump(data))
    done = admin.post("/reload", timeout=60)
    assert (done.status_code, done.json()["status"]) == (200, "reloaded")
    assert "a.slo.ttft 2.0 -> 7.0" in done.json()["changes"]
    assert admin.get("/status").json()["revision"] == 1
    path.write_text(good.replace("name: a", "nam: a"))
    wrong = admin.post("/reload", timeout=60)
    assert wrong.status_code == 400
    error = wrong.json()["error"]
    assert "models[0]" in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": None, "code": "reload"}
    path.write_text(yaml.safe_dump(data))
    for method in ("get", "put"):
        assert getattr(admin, method)("/reload").status_code == 405
    assert httpx.post(f"{cluster.url}/reload").status_code in (401, 404)
    assert admin.get("/status").json()["revision"] == 1


def check(folder: Path, temporary: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SERVE, "check", "--config", str(folder / "prism.yaml")], capture_output=True, text=True,
        timeout=60, check=False, env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip


def test_nobody_else_is_reached_without_keys(tmp_path: Path, short_dir: Path) -> None:
    write_yaml(tmp_path, frontend={"port": 0, "admin": "0.0.0.0:0"})
    done = check(tmp_path, short_dir)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: frontend.admin: other machines reach 0.0.0.0, and")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_the_port_of_the_api_is_found_before_the_start(
    tmp_path: Path, short_dir: Path, host: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    settings = {"port": port, "admin": f"{host}:{port}"}
    write_yaml(tmp_path, frontend=settings, access={"open_to_all": True})
    done = check(tmp_path, short_dir)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: frontend.admin: cannot listen on {host}:{port}: Address")


def test_addresses(tmp_path: Path) -> None:
    assert host_and_port("[::1]:8001") == ("::1", 8001)
    assert admin_address("", tmp_path) == ""
    assert admin_address("localhost:8001", tmp_path) == "localhost:8001"
    assert admin_address("./admin.sock", Path("/srv")) == "/srv/admin.sock"
    for wrong in ("8001", "host", "127.0.0.1:99999", "127.0.0.1:x", ":8001", "me@host:1"):
        with pytest.raises(ConfigError, match=r"^frontend\.admin: .* is neither HOST:PORT nor a"):
            admin_address(wrong, tmp_path)
    with pytest.raises(ConfigError, match=r"^frontend\.admin: .* too long for a Unix socket"):
        admin_address("./" + "x" * 120, tmp_path)


def test_listeners(short_dir: Path) -> None:
    with admin_listener("127.0.0.1:0") as listener:
        address = bound_address("127.0.0.1:0", listener)
        with pytest.raises(ConfigError, match=rf"^frontend\.admin: cannot listen on {address}: A"):
            admin_listener(address).__enter__()
    file = short_dir / "file"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"^frontend\.admin: cannot listen on .*remove what is"):
        admin_listener(str(file)).__enter__()
    assert file.read_text() == "mine"
    path = str(short_dir / "admin.sock")
    with admin_listener(path) as before:
        before.close()
        with admin_listener(path):  # of a cluster that starts before the other one has ended
            pass
    with admin_listener(path) as before:
        before.close()
        successor = admin_listener(path)
        successor.__enter__()
    assert Path(path).is_socket()
    successor.__exit__(None, None, None)
    assert not Path(path).exists()
