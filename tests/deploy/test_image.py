"""deploy/docker: the Dockerfile for hadolint, its stages, and its health check."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.deploy.tools import DEPLOY, ROOT, tools_bin

DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
HEALTH = DEPLOY / "docker" / "health.py"
TEXT = DOCKERFILE.read_text().replace("\\\n", "")


def stages() -> dict[str, list[str]]:
    """Returns the instructions of each stage, with those of the stages that it starts from."""
    found: dict[str, list[str]] = {}
    lines = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
    name = ""
    for line in lines:
        if begin := re.match(r"FROM (\S+) AS (\S+)$", line):
            name = begin.group(2)
            found[name] = list(found.get(begin.group(1), []))
        elif name:
            found[name].append(line)
    return found


def hadolint(file: Path) -> str:
    command = [str(tools_bin() / "hadolint"), "--no-color", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.mark.slow
def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    assert hadolint(DOCKERFILE) == ""
    worse = tmp_path / "Dockerfile"
    worse.write_text(DOCKERFILE.read_text().replace("ubuntu24.04@", "latest@"))
    worse.write_text(worse.read_text() + "RUN cd /src && sudo make\n")
    assert {"DL3003", "DL3004"} <= set(re.findall(r"DL\d{4}", hadolint(worse)))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_as_its_own_user_with_a_health_check(target: str) -> None:
    lines = stages()[target]
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]
    assert lines.index("USER 10001:10001") > max(
        index for index, line in enumerate(lines) if line.startswith(("RUN", "COPY"))
    )
    assert any("useradd --uid 10001" in line for line in lines)
    [check] = [line for line in lines if line.startswith("HEALTHCHECK")]
    assert check.endswith('CMD ["/opt/prism/bin/python", "/opt/prism/health.py"]')
    assert 'ENTRYPOINT ["tini", "--", "prism-serve"]' in lines


def test_compilers_are_where_kernels_are_compiled_at_run_time() -> None:
    compilers = {name: "g++" in " ".join(lines) for name, lines in stages().items()}
    assert not compilers["cpu"]
    assert compilers["cuda"]
    assert compilers["wheels-cpu"]


def test_bases_are_pinned() -> None:
    bases = re.findall(r"^ARG \w+_BASE=(\S+)$", TEXT, re.MULTILINE)
    assert len(bases) == 2
    assert all(re.search(r":[\w-]*\d+\.\d+[\w.-]*$", each) for each in bases)
    used = re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)
    assert {each for each in used if each.startswith("$")} == {"${CPU_BASE}", "${CUDA_BASE}"}


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    kept = {line[1:] for line in ignored() if line.startswith("!")}
    assert all((ROOT / each).exists() for each in kept)
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", TEXT, re.MULTILINE)
    sources = {source for line in copied for source in line.split()} - {"."}
    assert len(sources) > 5
    tops = {each.split("/")[0] for each in kept}
    assert all((ROOT / each).exists() and each.split("/")[0] in tops for each in sources)


def test_packages_of_an_image_need_no_compiler() -> None:
    """Checks the options with which the Dockerfile runs scripts/install as well."""
    used = set(re.findall(r"[ +](--[a-z-]+)", " ".join(re.findall(r"scripts/install (.*)", TEXT))))
    assert used == {"--packages", "--cuda", "--venv", "--torch-index"}
    codes = {}
    for options in (("--packages",), ()):
        command = [str(ROOT / "scripts" / "install"), *options, "--check"]
        environment = os.environ | {"CXX": "no-compiler"}
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        codes[options] = done.returncode
    assert codes == {("--packages",): 0, (): 2}


def ignored() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    return lines


@pytest.fixture
def answering() -> Iterator[HTTPServer]:
    """Provides a server on the loopback address that answers with `status`."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(self.server.status)  # type: ignore[attr-defined]
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def health(url: str) -> int:
    command = [sys.executable, str(HEALTH)]
    done = subprocess.run(
        command, env={"PRISM_HEALTH_URL": url}, capture_output=True, timeout=20, check=False
    )
    return done.returncode


def test_the_health_check_needs_200(answering: HTTPServer) -> None:
    url = f"http://127.0.0.1:{answering.server_port}/health"
    codes = []
    for status in (200, 503, 401):
        answering.status = status  # type: ignore[attr-defined]
        codes.append(health(url))
    assert codes == [0, 1, 1]


def test_the_health_check_fails_without_a_server() -> None:
    assert health("http://127.0.0.1:1/health") == 1
