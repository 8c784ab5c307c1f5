"""Keys and TLS of a whole cluster, and which addresses need them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
import yaml

from prism.config.api_keys import add_key, read_keys, variable_keys
from prism.config.schema.access import AccessYaml, ApiKey, hashed
from prism.errors import ConfigError
from prism_replay.results import read_results
from prism_replay.trace import write_trace
from tests.replay.records import a_request
from tests.serve.conftest import SERVE, Cluster, serving, write_yaml

FILE = AccessYaml(keys="keys.yaml")
IN_VARIABLE = "from-the-environment-123"


def new_key(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*SERVE, "new-key", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def make_certificate(folder: Path) -> None:
    names = ["-subj", "/CN=prism.example", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *made],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cluster, str]]:
    """Yields a cluster that listens on all addresses with TLS, and the key in its file."""
    make_certificate(tmp_path)
    monkeypatch.setenv("PRISM_TEST_KEYS", f"env={IN_VARIABLE}")
    made = new_key("alice", "--keys", str(tmp_path / "keys.yaml"), "--model", "a", "--operator")
    assert made.returncode == 0, made.stderr
    frontend = {
        "port": 0, "host": "0.0.0.0", "admin": "127.0.0.1:0",
        "tls_certificate": "cert.pem", "tls_key": "key.pem",
    }  # fmt: skip
    access = {"keys": "keys.yaml", "keys_variable": "PRISM_TEST_KEYS"}
    with (
        TemporaryDirectory(prefix="prism-") as temporary,
        serving(tmp_path, Path(temporary), frontend=frontend, access=access) as cluster,
    ):
        yield cluster, made.stdout.strip()


def test_a_cluster_with_keys_and_tls(guarded: tuple[Cluster, str], tmp_path: Path) -> None:
    cluster, key = guarded
    assert cluster.url.startswith("https://127.0.0.1:")
    with httpx.Client(base_url=cluster.url, verify=False) as client:
        assert client.get("/health").status_code == 200
        body = {"model": "a", "prompt": [9, 8], "max_tokens": 4}
        assert client.post("/v1/completions", json=body).status_code == 401
        for each, model, status in ((key, "a", 200), (key, "b", 404), (IN_VARIABLE, "b", 200)):
            headers = {"Authorization": f"Bearer {each}"}
            answer = client.post("/v1/completions", json=body | {"model": model}, headers=headers)
            assert answer.status_code == status, answer.text
    resolved = (cluster.run_dir / "cluster.json").read_text()
    page = f"https://{json.loads(resolved)['admin']}/status"
    for each, status in ((key, 200), (IN_VARIABLE, 403)):
        answer = httpx.get(page, headers={"Authorization": f"Bearer {each}"}, verify=False)
        assert answer.status_code == status, answer.text
    logs = "".join(f.read_text(errors="replace") for f in (tmp_path / "logs").glob("*.log"))
    assert '"key":"alice"' in logs
    for secret in (key, IN_VARIABLE):
        assert secret not in resolved + logs + (tmp_path / "keys.yaml").read_text()
        for pid in cluster.pids:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            assert secret.encode() not in environment


def test_a_replay_with_a_key_and_the_clusters_own_certificate(
    guarded: tuple[Cluster, str], tmp_path: Path
) -> None:
    cluster, key = guarded
    trace, out = tmp_path / "trace.jsonl", tmp_path / "run.json"
    write_trace(trace, [a_request(0.1 * number, "a") for number in range(3)])
    command = [sys.executable, "-m", "prism_replay.cli.replay", "run", str(trace), "--strict"]
    command += ["--url", cluster.url, "--out", str(out), "--token-ids", "1-9"]
    admin = json.loads((cluster.run_dir / "cluster.json").read_text())["admin"]
    command += ["--status-url", f"https://{admin}"]
    for certificate, code in (([], 2), (["--cacert", str(tmp_path / "cert.pem")], 0)):
        done = subprocess.run(
            [*command, *certificate], capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "OPENAI_API_KEY": key},
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert ("give its certificate with --cacert" in done.stderr) == (code == 2)
    results = read_results(out)
    assert results.summary.total.errors == {}
    assert results.counters is not None


def test_nobody_else_is_reached_without_keys(tmp_path: Path) -> None:
    for command in ("check", "up"):
        path = write_yaml(tmp_path, frontend={"port": 0, "host": "0.0.0.0"})
        done = subprocess.run(
            [*SERVE, command, "--config", str(path)], capture_output=True, text=True, timeout=60,
            check=False, env={**os.environ, "TMPDIR": str(tmp_path)},
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: frontend.host: other machines reach 0.0.0.0, and")


def test_keys_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys.yaml"
    good = {"name": "x", "sha256": hashed("k")}
    for keys, message in (
        ([good, good], "access: two keys have the name 'x'; rename one"),
        ([good | {"name": "x y"}], "keys[0].name: 'x y' is not a valid name"),
        ([good | {"sha256": "k"}], "sha256: is not 64 hexadecimal digits"),
        ([good | {"models": ["zzz"]}], "keys[0].models: unknown model 'zzz'"),
        ([good | {"tokens_per_minute": -1}], "tokens_per_minute: -1 must be >= 0"),
        ([good | {"modles": []}], "modles: unknown key; did you mean 'models'?"),
        ([], "access: no key was found; make one with prism-serve new-key"),
    ):
        file.write_text(yaml.safe_dump({"keys": keys}))
        with pytest.raises(ConfigError, match="access") as caught:
            read_keys(FILE, [], tmp_path, ["a"])
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match=r"access\.keys: cannot read .*: No such file"):
        read_keys(AccessYaml(keys="nothing.yaml"), [], tmp_path, ["a"])
    monkeypatch.setenv("SHORT", "me=secret")
    with pytest.raises(ConfigError, match=r"\$SHORT must be NAME=KEY.*20 characters") as short:
        variable_keys("SHORT")
    assert "secret" not in str(short.value)
    assert new_key("x", "--keys", str(tmp_path / "new.yaml")).returncode == 0
    again = new_key("x", "--keys", str(tmp_path / "new.yaml"))
    assert (again.returncode, again.stderr[:11]) == (2, "error: NAME")
    assert (tmp_path / "new.yaml").stat().st_mode & 0o777 == 0o600
    nowhere = new_key("x", "--keys", str(tmp_path / "no" / "keys.yaml"))
    assert (nowhere.returncode, nowhere.stdout) == (2, "")
    assert nowhere.stderr.startswith("error: --keys: cannot write ")
    assert nowhere.stderr.count("\n") == 1


@pytest.mark.parametrize("before", ["", "  "], ids=["flush", "indented"])
def test_comments_of_the_keys_stay(tmp_path: Path, before: str) -> None:
    file = tmp_path / "keys.yaml"
    entry = f"{before}- name: one # of the batch jobs\n{before}  sha256: {hashed('k')}\n"
    written = f"# Who may ask.\nkeys:\n{entry}"
    file.write_text(written)
    add_key(file, ApiKey("two", hashed("l"), operator=True))
    assert file.read_text().startswith(written)
    assert [key.name for key in read_keys(FILE, [], tmp_path, [])] == ["one", "two"]
    # A file without a place for an entry at its end is written anew.
    file.write_text(f"keys: [{{name: one, sha256: {hashed('k')}}}]\n")
    add_key(file, ApiKey("two", hashed("l")))
    assert len(read_keys(FILE, [], tmp_path, [])) == 2
