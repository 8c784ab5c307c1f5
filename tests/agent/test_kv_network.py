"""KV between agents of two machines: real sockets and files, two addresses of this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import zmq.asyncio
from msgspec import structs

from prism.agent.inbox import CancelInbox
from prism.agent.network import kv_receiver, kv_sender, sockets
from prism.agent.network.kv_transfer import KvNetwork
from prism.agent.network.sockets import MEASURED_BYTES_MIN, MEASURED_S, PeerLinks
from prism.agent.state.device_state import DeviceState, HostedModel, ModelState
from prism.agent.state.engine_pool import EnginePool, EngineState
from prism.config.schema.cluster_config import ClusterConfig, DeviceConfig
from prism.config.schema.endpoints import NodeConfig
from prism.curve import new_secret
from prism.engines.kv_moves import kv_file
from prism.messages.engine import Activated, Export
from prism.messages.kv import KvPart, KvTaken
from prism.messages.requests import Request, Resume
from prism_sim.cluster.device import Resident
from prism_sim.cluster.handover import kv_is_sent
from prism_sim.cluster.world import World
from prism_sim.core.setup import ActivationSettings
from tests.agent.harness import model_spec, until
from tests.ports import free_port
from tests.queueing.requests import request
from tests.sim.clusters import cluster, work
from tests.sim.clusters import model as sim_model
from tests.sim.clusters import request as trace_request

HERE, THERE = "host:0@a", "host:0@b"
CAPACITY_BYTES = 8 << 20
TOKENS, TOKEN_BYTES = 3000, 1001  # 11.5 parts, and no whole number of pages
NAME = "0123456789abcdef" * 2 + ".npy"
TOKEN_KV_BYTES = 256  # a quantum of 4096 bytes has 16 tokens


class Machine:
    """Agent's state on one machine. `drops`: numbers of parts that are lost on the way."""

    def __init__(self, config: ClusterConfig) -> None:
        [device] = [d.name for d in config.devices if d.name.endswith(f"@{config.node}")]
        self.state = DeviceState(EnginePool("host:0", 1))
        self.kv = KvNetwork(config, device, self.state)
        self.kv.sender._is_wanted = lambda request: request.id not in self.unwanted
        self.folder = Path(config.local().moves_dir)
        self.unwanted: set[str] = set()
        self.drops: set[int] = set()
        self.came = 0
        self._task: asyncio.Task[None] | None = None
        self.answers: list[KvTaken] = []
        self._context = zmq.asyncio.Context()
        self.inbox = CancelInbox(
            self._context,
            config.own_cancel_endpoints(device),
            cast("Any", None),
            on_gone=cast("Any", None),
            on_kv=self._take,
            secret=config.cluster_key,
        )

    def _take(self, message: KvPart | KvTaken) -> None:
        if isinstance(message, KvTaken):
            self.answers.append(message)
        else:
            self.came += 1
            if self.came in self.drops:
                return
        self.kv.take(message)

    def start(self) -> None:
        self.inbox.bind()
        self._task = asyncio.create_task(self.inbox.run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self.kv.close()
        self.inbox.close()
        self._context.destroy(0)

    def files(self) -> list[str]:
        return os.listdir(self.folder) if self.folder.exists() else []

    def saved(self, count: int = 1, seed: int = 0) -> list[Request]:
        """Returns requests with KV in files."""
        made = []
        for i in range(count):
            path = kv_file.save(str(self.folder), [rows(seed + i)], 1)
            assert path
            resume = Resume([7, 8], path, TOKENS)
            made.append(structs.replace(request(str(i), "a"), resume=resume))
        return made


def rows(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (TOKENS, TOKEN_BYTES), np.uint8)


@pytest.fixture
def configs(namespace: str, short_dir: Path) -> Iterator[list[ClusterConfig]]:
    nodes = [
        NodeConfig(name, address, free_port(), 1, 1, network_bytes_s=rate)
        for name, address, rate in (("a", "127.0.0.1", 4e6), ("b", "127.0.0.2", 1e6))
    ]
    plain = ClusterConfig(
        namespace=namespace,
        run_dir="",
        redis_url="",
        policy="prism",
        devices=[DeviceConfig(name, CAPACITY_BYTES, 4096, 1) for name in (HERE, THERE)],
        models=[],
        nodes=nodes,
        cluster_key=new_secret(),
    )
    made = []
    for node in "ab":
        (short_dir / node).mkdir()
        made.append(structs.replace(plain, node=node, run_dir=str(short_dir / node)))
    yield made
    for config in made:
        shutil.rmtree(config.local().moves_dir, ignore_errors=True)


@pytest.fixture
async def machines(configs: list[ClusterConfig]) -> AsyncIterator[list[Machine]]:
    made = [Machine(config) for config in configs]
    for each in made:
        each.start()
    yield made
    for each in made:
        await each.stop()


async def sent(source: Machine, requests: list[Request]) -> list[Request]:
    """Sends the requests' KV; returns the requests as they resume."""
    came: list[Request] = []
    source.kv.sender.begin(requests, THERE, came.append)
    await until(lambda: len(came) == len(requests))
    assert source.files() == []
    return came


def is_computed_again(request: Request) -> bool:
    assert request.resume is not None
    return request.resume == Resume([7, 8])


async def test_all_of_it_comes(machines: list[Machine]) -> None:
    source, target = machines
    came = await sent(source, source.saved(3))
    assert [each.id for each in came] == ["0", "1", "2"]
    for number, each in enumerate(came):
        assert each.resume is not None
        path, device = each.resume.kv_path, each.resume.kv_device
        assert (Path(path).parent, device) == (target.folder, THERE)
        assert (each.resume.kv_tokens, each.resume.output_ids) == (TOKENS, [7, 8])
        assert os.stat(path).st_mode & 0o777 == 0o600
        taken = kv_file.take(path, 1, TOKENS, TOKEN_BYTES)
        assert taken is not None
        assert (taken[0] == rows(number)).all()
    assert target.files() == []


async def test_a_lost_part_costs_the_file_and_what_is_behind_it(machines: list[Machine]) -> None:
    source, target = machines
    target.drops = {16}  # of the second one
    first, *others = await sent(source, source.saved(3))
    assert not is_computed_again(first)
    assert all(map(is_computed_again, others))
    assert "does not follow the" in source.answers[-1].problem
    await until(lambda: len(target.files()) == 1)  # that of the first one


async def test_a_target_that_says_nothing_is_waited_for_once(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers a target that dies midway; the requests queued after that are not tried."""
    monkeypatch.setattr(kv_sender, "LEAST_S", 0.3)
    monkeypatch.setattr(kv_sender, "SLACK", 0.0)
    source, target = machines
    target.drops = set(range(5, 1000))
    came = await sent(source, source.saved(3))
    assert all(map(is_computed_again, came))
    assert len({each.name for each in source.answers}) == 1


async def test_a_target_that_is_not_there(
    configs: list[ClusterConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_sender, "LEAST_S", 0.3)
    monkeypatch.setattr(kv_sender, "SLACK", 0.0)
    source = Machine(configs[0])
    source.start()
    assert all(map(is_computed_again, await sent(source, source.saved(2))))
    await source.stop()


async def test_an_agent_that_ends_computes_again_what_has_not_come(
    machines: list[Machine],
) -> None:
    source, target = machines
    target.drops = {2}
    came: list[Request] = []
    source.kv.sender.begin(source.saved(2), THERE, came.append)
    await asyncio.sleep(0)
    await source.kv.sender.close()
    assert list(map(is_computed_again, came)) == [True, True]
    assert source.files() == []


async def test_what_is_not_wanted_any_more_is_not_sent_on(machines: list[Machine]) -> None:
    source, target = machines
    requests = source.saved(2)
    source.unwanted = {"0"}
    first, second = await sent(source, requests)
    assert is_computed_again(first)
    assert not is_computed_again(second)
    assert len(target.files()) == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": "../" + NAME}, "is not a valid name of a KV file"),
        ({"name": "x.npy"}, "is not a valid name of a KV file"),
        ({"size_bytes": CAPACITY_BYTES + 1}, "is not a valid size of a request's KV"),
        ({"size_bytes": 0}, "is not a valid size of a request's KV"),
        ({"size_bytes": 3}, "4 bytes is empty or exceeds the file"),
        ({"data": b""}, "0 bytes is empty or exceeds the file"),
    ],
)
async def test_what_no_agent_sends_is_not_taken(
    machines: list[Machine], change: dict[str, Any], problem: str
) -> None:
    source, target = machines
    part = structs.replace(KvPart(HERE, NAME, 8, 0, b"1234"), **change)
    source.kv.peers.send(THERE, part)
    await until(lambda: source.answers)
    assert problem in source.answers[0].problem
    assert target.files() == []
    assert not list(target.folder.parent.glob(NAME))


@pytest.mark.parametrize("sender", [THERE, "host:0@z", "host:7@a", "../x"])
async def test_only_devices_of_other_machines_send(machines: list[Machine], sender: str) -> None:
    target = machines[1]
    target.kv.take(KvPart(sender, NAME, 8, 0, b"1234"))
    assert target.files() == []


async def test_a_file_that_is_there_is_not_written_over(machines: list[Machine]) -> None:
    source, target = machines
    target.folder.mkdir(mode=0o700)
    (target.folder / NAME).write_bytes(b"another one")
    source.kv.peers.send(THERE, KvPart(HERE, NAME, 4, 0, b"1234"))
    await until(lambda: source.answers)
    assert "exists" in source.answers[0].problem
    assert (target.folder / NAME).read_bytes() == b"another one"


async def test_a_folder_that_others_may_change_is_not_used(machines: list[Machine]) -> None:
    source, target = machines
    target.folder.mkdir()
    target.folder.chmod(0o777)
    assert all(map(is_computed_again, await sent(source, source.saved(1))))
    assert target.files() == []


async def test_no_room_there(machines: list[Machine]) -> None:
    source, target = machines
    target.folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(target.folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:  # noqa: ASYNC221
        pytest.skip("only root makes a small file system")
    try:
        assert all(map(is_computed_again, await sent(source, source.saved(2))))
        assert "No space left" in source.answers[-1].problem
        assert target.files() == []
    finally:
        subprocess.run(["umount", str(target.folder)], check=True)  # noqa: ASYNC221


async def test_what_a_sender_does_not_end_goes(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removes the files when the sender is silent or begins another file, or the agent ends."""
    source, target = machines
    names = [str(i) + NAME[1:] for i in range(3)]
    for name in names[:2]:
        source.kv.peers.send(THERE, KvPart(HERE, name, 8, 0, b"1234"))
    await until(lambda: len(source.answers) == 2)
    assert target.files() == names[1:2]
    target.kv.tick()
    assert target.files() == names[1:2]
    monkeypatch.setattr(kv_receiver, "SILENT_S", -1.0)
    target.kv.tick()
    assert target.files() == []
    source.kv.peers.send(THERE, KvPart(HERE, names[2], 8, 0, b"1234"))
    await until(lambda: len(source.answers) == 3)
    assert target.files() == names[2:]
    await target.kv.close()
    assert target.files() == []


@pytest.mark.parametrize(
    ("targets", "tokens_per_s", "export"),
    [
        (("host:1@a", "host:2@a"), 1.0, Export(("host:1", "host:2"))),
        ((THERE,), 1e6 / TOKEN_KV_BYTES - 1, Export()),
        ((THERE,), 1e6 / TOKEN_KV_BYTES + 1, Export(None)),
        ((THERE,), 0.0, Export()),  # not measured: by the first estimate
        ((THERE, "host:1@b"), 1.0, Export(None)),
        (("host:0@z",), 1.0, Export(None)),
    ],
)
async def test_it_is_sent_if_the_network_carries_more_than_prefill_makes(
    machines: list[Machine], targets: tuple[str, ...], tokens_per_s: float, export: Export
) -> None:
    hosted = active(machines[0].state, tokens_per_s)
    assert machines[0].kv.export(hosted, targets) == export
    assert hosted.kv_target == (THERE if export == Export() else "")


async def test_a_network_that_carries_less_than_it_should_is_believed_for_a_while(
    configs: list[ClusterConfig],
) -> None:
    """Measures KV that arrived, or did not in time. Small files do not count."""
    now_s = [0.0]
    peers = PeerLinks(configs[0], lambda: now_s[0])
    peers.measured(THERE, MEASURED_BYTES_MIN - 1, 1e9)
    assert peers.network_bytes_s(THERE) == 1e6
    peers.measured(THERE, MEASURED_BYTES_MIN, 100.0)
    assert peers.network_bytes_s(THERE) == MEASURED_BYTES_MIN / 100
    peers.measured(THERE, MEASURED_BYTES_MIN, 0.01)
    assert peers.network_bytes_s(THERE) == 1e6
    peers.measured(THERE, MEASURED_BYTES_MIN, 100.0)
    now_s[0] = MEASURED_S
    assert peers.network_bytes_s(THERE) == 1e6
    peers.close()


async def test_what_is_sent_is_measured(
    machines: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MEASURED_BYTES_MIN", 1 << 20)
    source = machines[0]
    source.kv.peers.config = structs.replace(
        source.kv.peers.config,
        nodes=[structs.replace(n, network_bytes_s=1e15) for n in source.kv.peers.config.nodes],
    )
    await sent(source, source.saved(1))
    assert 1e4 < source.kv.peers.network_bytes_s(THERE) < 1e12


def active(state: DeviceState, tokens_per_s: float, token_bytes: int = TOKEN_KV_BYTES) -> Any:
    """Returns a model with this measured speed of prefills."""
    engine = state.pool.create(0.0)
    engine.become(EngineState.ACTIVE, 0.0, "a")
    engine.activated = Activated("a", 16 * token_bytes, 16, 0, 0, 0, 16, 4)
    state.models.totals("a").prefill_tokens_per_s = tokens_per_s
    return HostedModel(model_spec("a"), 0.0, ModelState.ACTIVE, engine_id=engine.id)


async def test_the_simulator_decides_alike(configs: list[ClusterConfig]) -> None:
    """Compares both for the same model, measured speed and network."""
    chosen = set()
    config = configs[0]
    for rate, token_bytes, speed in product((1e6, 1.25e9), (512, 131_072), (90.0, 8e3, 2e4)):
        nodes = [structs.replace(each, network_bytes_s=rate) for each in config.nodes]
        live = Machine(structs.replace(config, nodes=nodes))
        export = live.kv.export(active(live.state, speed, token_bytes), (THERE,))
        await live.stop()
        one = sim_model(0, "a", token_bytes=token_bytes, speed_tokens_per_s=speed)
        built = cluster([one], activation=ActivationSettings(network_bytes_s=rate))
        world = World(built, work(built, [trace_request(0.0, "a")]))
        resident = Resident(one, [world.devices[0]], 0.0, 0.0)
        assert kv_is_sent(resident, built.activation) is (export == Export())
        chosen.add(export == Export())
    assert chosen == {False, True}
