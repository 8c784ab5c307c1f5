"""Connections that begin no TLS, and keys that cannot be read."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from pathlib import Path

import pytest
import uvicorn
import uvloop
from starlette.applications import Starlette

from prism.config.resolve import _with_tls
from prism.config.schema.cluster_config import FrontendConfig
from prism.errors import ConfigError
from prism.frontend import __main__ as frontend


def make_certificate(folder: Path, *options: str) -> tuple[str, str]:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=x"]
    command += ["-keyout", "key.pem", "-out", "cert.pem", *options]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return str(folder / "cert.pem"), str(folder / "key.pem")


def test_a_handshake_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "HANDSHAKE_TIMEOUT_S", 0.2)
    certificate, key = make_certificate(tmp_path, "-nodes")

    async def connect_and_say_nothing() -> bytes:
        listener = socket.create_server(("127.0.0.1", 0))
        server = frontend.UvicornServer(
            uvicorn.Config(
                Starlette(), lifespan="off", log_config=None, ssl_certfile=certificate,
                ssl_keyfile=key,
            )
        )  # fmt: skip
        task = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        async with asyncio.timeout(20):
            said = await reader.read()
        writer.close()
        server.should_exit = True
        await task
        return said

    assert uvloop.run(connect_and_say_nothing(), loop_factory=frontend.AcceptingLoop) == b""


def test_a_key_with_a_passphrase_is_refused(tmp_path: Path) -> None:
    """Rejects the key, for whose passphrase OpenSSL would ask on the terminal."""
    certificate, key = make_certificate(tmp_path, "-passout", "pass:secret")
    with pytest.raises(ConfigError, match=r"^frontend\.tls_key: .*key\.pem has a passphrase"):
        _with_tls(FrontendConfig(tls_certificate=certificate, tls_key=key), tmp_path)
