"""Prompts and secrets are in no log, no file and no process's arguments, whatever happens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from prism.config.resolved import read_resolved
from tests.serve.conftest import Cluster, descendants, serving, until
from tests.serve.test_doors import shared_files
from tests.serve.test_hangs import killed_and_replaced

PROMPT = "quixotic zebra lighthouse"
KEY = "sk-never-to-be-written-0123456789"
HEADERS = {"Authorization": f"Bearer {KEY}", "X-Api-Key": KEY}
VERBOSE = "import sys; sys.argv += ['--log-level', 'debug']"
CHAT = [{"role": "system", "content": PROMPT}, {"role": "user", "content": PROMPT}]


def ask(cluster: Cluster, path: str = "completions", **body: Any) -> httpx.Response:
    said = {"messages": CHAT} if path == "chat/completions" else {"prompt": PROMPT}
    json = {"model": "a", "max_tokens": 8, **said, **body}
    return httpx.post(f"{cluster.url}/v1/{path}", json=json, headers=HEADERS, timeout=60)


def refusals(cluster: Cluster) -> Iterator[int]:
    """Yields statuses of invalid requests, with the prompt in the place of each mistake."""
    yield ask(cluster, model="nope").status_code
    yield ask(cluster, prompt=PROMPT * 2000).status_code
    for wrong in ("max_tokens", "temperature", "seed", "stream", "n", "logit_bias", "nope"):
        yield ask(cluster, **{wrong: PROMPT}).status_code
    yield ask(cluster, "chat/completions", messages=PROMPT).status_code
    yield ask(cluster, "chat/completions", messages=[{"role": PROMPT, "content": 1}]).status_code
    for content in (f'{{"prompt": "{PROMPT}', f'"{PROMPT}"', f'{{"{PROMPT}": 1}}', f"\xff{PROMPT}"):
        url = f"{cluster.url}/v1/completions"
        raw = content.encode("latin-1")
        yield httpx.post(url, content=raw, headers=HEADERS, timeout=60).status_code
    yield httpx.get(f"{cluster.url}/v1/{PROMPT}", headers=HEADERS).status_code


def stream_beside(cluster: Cluster, name: str) -> None:
    """Streams while a process is killed. Without a name, the client leaves instead."""
    body = {"model": "a", "prompt": PROMPT, "stop": [PROMPT], "max_tokens": 80, "stream": True}
    url = f"{cluster.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=90) as answer:
        lines = answer.iter_lines()
        next(lines)
        if name:
            killed_and_replaced(cluster, name, signal.SIGKILL)
            assert "data: [DONE]" in lines


def engine_of(cluster: Cluster) -> int:
    status = httpx.get(f"{cluster.url}/status").json()
    return int(next(m["engine_pid"] for m in status["agents"][0]["models"] if m["model"] == "a"))


def written(cluster: Cluster) -> Iterator[tuple[str, bytes]]:
    """Yields all that other processes of this user, or later readers of the disk, may read."""
    run_dir, logs = cluster.run_dir, (cluster.run_dir / "logs").resolve()
    for path in (cluster.log, *run_dir.rglob("*"), *logs.rglob("*"), *shared_files(cluster)):
        if path.is_file():
            yield str(path), path.read_bytes()
    for pid in (cluster.process.pid, *descendants(cluster.process.pid)):
        for name in ("cmdline", "environ"):
            with suppress(FileNotFoundError, ProcessLookupError):
                yield f"{pid}/{name}", Path(f"/proc/{pid}/{name}").read_bytes()


def test_nothing_that_is_written_down_holds_a_prompt_or_a_secret(
    tmp_path: Path, short_dir: Path
) -> None:
    with serving(tmp_path, short_dir, '{"decode_step_ms": 20}', VERBOSE) as cluster:
        config = read_resolved(cluster.run_dir / "cluster.json")
        password = urlsplit(config.redis_url).password
        assert password
        for path in ("completions", "chat/completions"):
            assert ask(cluster, path).status_code == 200
            assert ask(cluster, path, stream=True).status_code == 200
        assert {status // 100 for status in refusals(cluster)} == {4}
        stream_beside(cluster, "")
        engine = engine_of(cluster)
        os.kill(engine, signal.SIGKILL)
        until(lambda: ask(cluster).status_code == 200, "another engine", 60)
        stream_beside(cluster, "prism.agent")
        killed_and_replaced(cluster, "prism.frontend", signal.SIGKILL)
        assert any(b" DEBUG " in content for _, content in written(cluster))
        secrets = {PROMPT: "", KEY: "", password: str(cluster.run_dir / "cluster.json")}
        for name, content in written(cluster):
            for secret, only_in in secrets.items():
                assert secret.encode() not in content or name == only_in, f"{secret} in {name}"
    left = [path for path in (tmp_path / "logs").iterdir() if path.is_file()]
    assert left
    for path in left:
        content = path.read_bytes()
        assert not any(secret.encode() in content for secret in secrets), path
    assert not cluster.temporary.exists() or not list(cluster.temporary.glob("prism-*"))
