"""Fork servers that are forked from ready imports: they die with whom they serve, and only so."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from prism.agent.engines.fork_supervisor import ForkServerClient
from prism.config.resolved import write_resolved
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig
from prism.messages.forking import EngineForked, ForkEngine, ForkServerReady
from prism.process import child_environment
from tests.engines.harness import DEVICE, FORK_SERVER
from tests.engines.test_fresh_processes import INITIALISING
from tests.kvcached.compiling import build_libcuda
from tests.strangers import as_nobody, needs_root


class Keeper:
    """The process that keeps the imports, and its clients."""

    def __init__(self, folder: Path) -> None:
        devices = [DeviceConfig(DEVICE, 1 << 20, 1 << 16, 1)]
        config = ClusterConfig("none", str(folder), "", "prism", devices=devices, models=[])
        self.socket, self.config = config.preloaded_path(DEVICE, "fake"), folder / "cluster.json"
        write_resolved(config, self.config)
        self._clients: list[ForkServerClient] = []

    async def start(self, program: Sequence[str] = FORK_SERVER, **environment: str) -> None:
        command = [*program, "--adapter", "fake", "--config", str(self.config)]
        command += ["--device", DEVICE, "--preloaded", str(self.socket)]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *command, env=child_environment() | environment
        )

    async def fork_server(self) -> ForkServerClient:
        client = await ForkServerClient.start("fake", self.config, DEVICE, self.socket)
        self._clients.append(client)
        assert isinstance(await client.event(), ForkServerReady)
        return client

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def close(self) -> None:
        for client in self._clients:
            client.kill()
            await client.stop(10.0)
            # Its engines may still hold the other end.
            client._process.stdout._transport.close()  # type: ignore[union-attr]
        await self.kill()


@pytest.fixture
async def keeper(short_dir: Path) -> AsyncIterator[Keeper]:
    made = Keeper(short_dir)
    await made.start()
    yield made
    await made.close()


async def forks(client: ForkServerClient, engine_id: str) -> bool:
    client.fork(ForkEngine(engine_id))
    return isinstance(await client.event(), EngineForked)


async def test_a_fork_server_ends_with_its_stdin(keeper: Keeper) -> None:
    client = await keeper.fork_server()
    found = psutil.Process(client.pid)
    assert found.name() == "prism-forks"
    assert await client.stop(10.0) == 0
    with suppress(psutil.NoSuchProcess):
        assert found.status() == psutil.STATUS_ZOMBIE
    with pytest.raises(ProcessLookupError):
        client._process.kill()


async def test_it_dies_with_whom_it_serves_even_while_it_is_stopped(keeper: Keeper) -> None:
    client, other = await keeper.fork_server(), await keeper.fork_server()
    os.kill(client.pid, signal.SIGSTOP)
    client._process.link.close()  # type: ignore[union-attr]
    await client._process.wait()
    assert await forks(other, "e1")


async def test_it_outlives_the_imports_and_the_next_ones_are_waited_for(keeper: Keeper) -> None:
    client = await keeper.fork_server()
    await keeper.kill()
    assert await forks(client, "e0")
    waiting = asyncio.create_task(keeper.fork_server())
    await keeper.start()
    assert await forks(await waiting, "e1")


async def test_nonsense_and_a_removed_socket_keep_nobody_from_it(keeper: Keeper) -> None:
    await keeper.fork_server()
    for said in (b"", b"\x00" * 4096):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(keeper.socket))
            stranger.send(said)
    keeper.socket.unlink()
    assert await forks(await keeper.fork_server(), "e0")
    keeper.socket.unlink()
    keeper.socket.write_text("junk")
    async with asyncio.timeout(30):
        while not keeper.socket.is_socket():
            await asyncio.sleep(0.01)
    assert await forks(await keeper.fork_server(), "e1")


async def test_cuda_that_the_imports_initialised_is_not_forked_twice(short_dir: Path) -> None:
    """Becomes a fork server of fresh processes, under the same pid."""
    keeper = Keeper(short_dir)
    await keeper.start(("-c", INITIALISING), KVCACHED_LIBCUDA=str(build_libcuda()))
    client = await keeper.fork_server()
    assert "--fresh" in psutil.Process(client.pid).cmdline()
    client.fork(ForkEngine("e0"))
    forked = await client.event()
    assert isinstance(forked, EngineForked)
    async with asyncio.timeout(30):
        while "prism.engines.processes.fresh_engine" not in psutil.Process(forked.pid).cmdline():
            await asyncio.sleep(0.01)  # it is about to be
    await keeper.close()


@needs_root
async def test_another_user_gets_none(keeper: Keeper, short_dir: Path) -> None:
    await keeper.fork_server()
    os.chmod(short_dir, 0o755)
    os.chmod(keeper.socket, 0o777)

    def refused() -> bool:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(30)
            stranger.connect(str(keeper.socket))
            try:
                socket.send_fds(stranger, [b"."], [0, 1, 2])
                return stranger.recv(1) == b""
            except (ConnectionResetError, BrokenPipeError):
                return True

    assert as_nobody(refused)
