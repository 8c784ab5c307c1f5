"""Two machines with Redis over TLS: a proxy, as the server here is built without TLS."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from prism.queueing.server import BundledRedis
from tests.frontend.test_tls import make_certificate
from tests.serve.test_nodes import answered, database, keys_left, node, refusal, write_nodes

__all__ = ["database"]


class TlsProxy:
    """Decrypts what comes to `port`, and sends it to a port of this machine."""

    def __init__(self, certificate: tuple[str, str], to: int) -> None:
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(*certificate)
        self._to, self.taken, self.port = to, 0, 0

    @contextmanager
    def running(self) -> Iterator[None]:
        began = threading.Event()
        loop, over = asyncio.new_event_loop(), asyncio.Event()
        thread = threading.Thread(target=self._run, args=(loop, over, began))
        thread.start()
        assert began.wait(10)
        try:
            yield
        finally:
            loop.call_soon_threadsafe(over.set)
            thread.join(10)

    def _run(
        self, loop: asyncio.AbstractEventLoop, over: asyncio.Event, began: threading.Event
    ) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._serve(over, began))

    async def _serve(self, over: asyncio.Event, began: threading.Event) -> None:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        began.set()
        async with server:
            await over.wait()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken += 1
        back, forth = await asyncio.open_connection("127.0.0.1", self._to)
        await asyncio.gather(self._copy(reader, forth), self._copy(back, writer))

    @staticmethod
    async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


@pytest.mark.long
def test_the_url_says_tls(
    tmp_path: Path, database: BundledRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks certificate and password, and removes the cluster's keys at the end."""
    certificate = make_certificate(tmp_path, "-nodes", "-addext", "subjectAltName=IP:127.0.0.1")
    plain = urlsplit(database.url)
    assert plain.port is not None
    proxy = TlsProxy(certificate, plain.port)
    with proxy.running(), ExitStack() as stack:
        url = f"rediss://:{plain.password}@127.0.0.1:{proxy.port}"
        path = write_nodes(tmp_path, url)
        assert "redis: " in refusal(path, "a")
        monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
        wrong = write_nodes(tmp_path, f"rediss://:wrong@127.0.0.1:{proxy.port}")
        assert "redis: " in refusal(wrong, "a")
        path = write_nodes(tmp_path, url)
        both = [stack.enter_context(node(path, name)) for name in "ab"]
        for each in both:
            each.await_ready()
        assert [answered(each, number) for each in both for number in range(20)] == [200] * 40
        assert proxy.taken > 6
        for each in both:
            assert each.stop() == 0
        assert keys_left(database) == []
