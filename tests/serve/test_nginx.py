"""examples/nginx.conf in front of a live cluster: streams, cancellations, what stays inside."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from tests.ports import free_port
from tests.serve.conftest import Cluster, serving, until
from tests.serve.test_access import make_certificate

NGINX = shutil.which("nginx") or "/usr/sbin/nginx"
CONF = Path(__file__).parents[2] / "examples/nginx.conf"
pytestmark = pytest.mark.skipif(not Path(NGINX).exists(), reason="needs nginx")


def adapted(folder: Path, cluster: Cluster, port: int) -> Path:
    """Returns the example with this test's ports and files, each of which must occur in it."""
    text = CONF.read_text()
    for old, new in (
        ("127.0.0.1:8000;", f"{cluster.url.removeprefix('http://')};"),
        ("listen 8443", f"listen 127.0.0.1:{port}"),
        ("/etc/prism/", f"{folder}/"),
        ("/tmp/prism-nginx.pid", f"{folder}/nginx.pid"),
        ("stderr warn", f"{folder}/error.log warn"),
    ):
        assert old in text
        text = text.replace(old, new)
    made = folder / "nginx.conf"
    made.write_text(text)
    return made


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, httpx.Client]]:
    """Yields a cluster and a client of the nginx in front of it, under the name prism.example."""
    folder = tmp_path_factory.mktemp("nginx")
    make_certificate(folder)
    port = free_port()
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(folder, Path(temporary), fake='{"decode_step_ms": 20}') as cluster,
    ):
        conf = adapted(folder, cluster, port)
        nginx = subprocess.Popen([NGINX, "-c", str(conf), "-g", "daemon off;"])
        client = httpx.Client(
            base_url=f"https://127.0.0.1:{port}",
            headers={"Host": "prism.example"},
            verify=False,
            timeout=60,
        )
        try:
            until(lambda: answers(client), "nginx answers")
            yield cluster, client
        finally:
            client.close()
            nginx.terminate()
            nginx.wait(10)


def answers(client: httpx.Client) -> bool:
    try:
        return get(client, "/health").status_code == 200
    except httpx.TransportError:
        return False


NAMED = {"sni_hostname": "prism.example"}


def get(client: httpx.Client, path: str) -> httpx.Response:
    return client.get(path, extensions=NAMED)


def body(**changes: object) -> dict[str, object]:
    return {"model": "a", "prompt": [9, 8, 7], "max_tokens": 20, "ignore_eos": True, **changes}


def outcomes(cluster: Cluster) -> dict[str, float]:
    lines = httpx.get(f"{cluster.url}/metrics", timeout=30).text.splitlines()
    ended = (line for line in lines if line.startswith("prism_requests_total{"))
    named = (line.partition('outcome="')[2].partition('"') for line in ended)
    return {name: float(rest.split()[-1]) for name, _, rest in named}


def test_an_answer_with_its_request_id(behind: tuple[Cluster, httpx.Client]) -> None:
    _, client = behind
    headers = {"X-Request-ID": "mine"}
    answer = client.post("/v1/completions", json=body(), headers=headers, extensions=NAMED)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json()["usage"]["completion_tokens"] == 20


def test_tokens_come_one_by_one_and_a_client_that_leaves_cancels(
    behind: tuple[Cluster, httpx.Client],
) -> None:
    """Excludes buffering, with which the request would be over at its first event."""
    cluster, client = behind
    before = outcomes(cluster).get("cancelled", 0)
    long = body(stream=True, max_tokens=200)
    with client.stream("POST", "/v1/completions", json=long, extensions=NAMED) as response:
        first = next(line for line in response.iter_lines() if line)
        assert json.loads(first.removeprefix("data: "))["choices"][0]["finish_reason"] is None
    until(lambda: outcomes(cluster).get("cancelled", 0) == before + 1, "it is cancelled")


@pytest.mark.parametrize("path", ["/metrics", "/status", "/dashboard", "/docs", "/v1x"])
def test_what_is_for_operators_stays_inside(
    behind: tuple[Cluster, httpx.Client], path: str
) -> None:
    assert get(behind[1], path).status_code == 404


def test_bodies_have_the_frontends_bound(behind: tuple[Cluster, httpx.Client]) -> None:
    _, client = behind
    for size, status in ((7 << 20, 400), (9 << 20, 413)):
        long = body(prompt="x" * size)
        answer = client.post("/v1/completions", json=long, extensions=NAMED)
        assert answer.status_code == status


def test_another_name_gets_no_handshake(behind: tuple[Cluster, httpx.Client]) -> None:
    with pytest.raises(httpx.ConnectError):
        behind[1].get("/health", extensions={"sni_hostname": "evil.example"})
