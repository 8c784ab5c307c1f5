"""Environment variables that engines read, and their effect in a stock engine on its device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvcached_plugins
from kvcached import Client, Device, Layout, NoRoomError
from kvcached.engines.device_share import DeviceShare
from kvcached.engines.settings import Settings
from kvcached.errors import DeviceMismatchError, InvalidArgumentError, UnknownDeviceError

from .caches import Cache
from .conftest import CAPACITY, PAGE, TINY

ROOT = Path(__file__).parent.parent.parent
MIB = 1 << 20
QUANTUM = TINY.quantum_bytes(PAGE)


def said(**values: str) -> dict[str, str]:
    return {f"KVCACHED_{name}": value for name, value in values.items()}


# --- the environment -------------------------------------------------------------------------


def test_everything_can_be_said() -> None:
    environment = said(
        DEVICE="host:0",
        CAPACITY="2GiB",
        PAGE="64KiB",
        NAMESPACE="mine",
        NAME="chat",
        LIMIT="1GiB",
        MINIMUM="64MiB",
        STATIC="100MB",
    )
    assert Settings.from_environment(environment) == Settings(
        device="host:0",
        namespace="mine",
        name="chat",
        capacity_bytes=2048 * MIB,
        page_bytes=PAGE,
        limit_bytes=1024 * MIB,
        min_bytes=64 * MIB,
        static_bytes=100_000_000,
    )


def test_the_device_alone_is_enough() -> None:
    environment = {"PATH": "/bin", "KVCACHED_LIBCUDA": "mine.so", **said(DEVICE="host:1", NAME="")}
    assert Settings.from_environment(environment) == Settings(device="host:1")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (said(LIMT="1GiB"), "KVCACHED_LIMT is not a known variable; known: KVCACHED_LIMIT"),
        (said(QUOTA="1"), "KVCACHED_QUOTA is not a known variable; known: .*KVCACHED_DEVICE"),
        (said(CAPACITY="much"), "KVCACHED_CAPACITY: size 'much' is not valid"),
        (said(LIMIT="0"), "KVCACHED_LIMIT is 0"),
        (said(LIMIT="1GiB", MINIMUM="2GiB"), "KVCACHED_MINIMUM is above KVCACHED_LIMIT"),
        (said(DEVICE="gpu"), "gpu"),
        (said(NAMESPACE="a b"), "namespace 'a b'"),
        (said(NAME="a\ud800"), "KVCACHED_NAME"),
    ],
)
def test_mistakes_are_named(value: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Settings.from_environment(said(DEVICE="host:0") | value)


def test_a_device_that_is_not_there_names_the_variable(namespace: str) -> None:
    settings = Settings("host:0", namespace=namespace)
    with pytest.raises(UnknownDeviceError, match="KVCACHED_CAPACITY"):
        settings.open_device()


def test_engines_with_different_sizes_get_the_variables(device: Device, namespace: str) -> None:
    for said_bytes in ({"capacity_bytes": 2 * CAPACITY}, {"page_bytes": 2 * PAGE}):
        settings = Settings("host:0", namespace=namespace, **said_bytes)  # type: ignore[arg-type]
        with pytest.raises(DeviceMismatchError, match="KVCACHED_CAPACITY and KVCACHED_PAGE"):
            settings.open_device()
    assert Settings("host:0", namespace=namespace).open_device().capacity_bytes == CAPACITY


# --- entry points ----------------------------------------------------------------------------


def entry_points() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups: dict[str, dict[str, str]] = project["entry-points"]
    return {f"{group}/{name}": value for group in groups for name, value in groups[group].items()}


@pytest.mark.parametrize("name", entry_points())
def test_an_engine_that_asks_for_nothing_pays_for_nothing(name: str) -> None:
    """Limits the modules that every process of every engine on the machine imports."""
    module, _, function = entry_points()[name].partition(":")
    code = (
        "import sys; before = set(sys.modules)\n"
        f"from {module} import {function}; found = {function}()\n"
        "print(found, *{m for m in set(sys.modules) - before if '_editable_' not in m})"
    )
    bare = {k: v for k, v in os.environ.items() if not k.startswith(("KVCACHED_", "SGLANG_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=True
    )
    found, *modules = done.stdout.split()
    assert found == "None"
    ours = {m for m in modules if m.split(".")[0] not in sys.stdlib_module_names}
    assert ours <= {"kvcached_plugins", "prism", "prism.engines", "prism.engines.platforms"}


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Removes the variables that other tests have set."""
    for name in [name for name in os.environ if name.startswith("KVCACHED_")]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("device", "platform"), [("host:0", "HostServer"), ("cuda:0", "CudaServer")]
)
def test_sglang_gets_the_platform_of_the_device(
    bare: pytest.MonkeyPatch, device: str, platform: str
) -> None:
    bare.setenv("KVCACHED_DEVICE", device)
    assert str(kvcached_plugins.sglang_platform()).endswith(f"server_platform.{platform}")


def test_sglang_without_kvcached_is_left_alone(bare: pytest.MonkeyPatch) -> None:
    code = "import kvcached_plugins, sys\nkvcached_plugins.sglang_general()\n"
    code += "sys.exit('sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("start", [kvcached_plugins.sglang_platform, kvcached_plugins.vllm_general])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (said(DEVICE="gpu:0"), "kvcached: .*gpu:0"),
        (said(DEVICE="host:0", CAPACTY="2GiB"), "kvcached: KVCACHED_CAPACTY is not a known"),
    ],
)
def test_a_mistake_ends_the_engine(
    value: dict[str, str],
    message: str,
    start: Callable[[], object],
    bare: pytest.MonkeyPatch,
) -> None:
    """Ends the engine. On any other exception engines log a line and serve without kvcached."""
    for name, text in value.items():
        bare.setenv(name, text)
    with pytest.raises(SystemExit, match=message):
        start()


def test_the_other_package_of_this_name_ends_the_engine(tmp_path: Path) -> None:
    (tmp_path / "kvcached-0.1.2.dist-info").mkdir()
    paths = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    code = "import kvcached_plugins\nkvcached_plugins.sglang_platform()\nprint('serves')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | said(DEVICE="host:0") | {"PYTHONPATH": paths},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert not done.stdout
    assert done.stderr.startswith("kvcached: both kvcached 0.1.2 and prism-kvcached are installed")


def test_a_package_of_this_name_without_adapters_ends_the_engine(tmp_path: Path) -> None:
    (tmp_path / "kvcached").mkdir()
    (tmp_path / "kvcached" / "__init__.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "sys.meta_path = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
    code += f"sys.path.append({str(ROOT)!r})\n"
    code += "import kvcached_plugins\nkvcached_plugins.vllm_general()\nprint('serves')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | said(DEVICE="host:0"),
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert not done.stdout
    assert re.match("kvcached: .*is another project's.*'pip uninstall kvcached'", done.stderr)


@pytest.mark.parametrize(
    "sizes", [(64 << 20, 3 << 10), (32 << 20, 64 << 20), (128 << 20, 24 << 20)]
)
def test_a_page_that_no_device_has_is_named(namespace: str, sizes: tuple[int, int]) -> None:
    capacity_bytes, page_bytes = sizes
    given = Settings(
        "host:0", namespace=namespace, capacity_bytes=capacity_bytes, page_bytes=page_bytes
    )
    with pytest.raises(InvalidArgumentError, match="correct KVCACHED_CAPACITY or KVCACHED_PAGE"):
        given.open_device()


def test_a_page_that_is_too_large_for_the_layout_is_named(namespace: str) -> None:
    page_bytes = 16 << 20
    given = Settings(
        "host:0", namespace=namespace, capacity_bytes=3 * page_bytes, page_bytes=page_bytes
    )
    share = DeviceShare(given, "engine")
    try:
        with pytest.raises(NoRoomError, match=r"lower KVCACHED_PAGE for all \(it is 16 MiB\)"):
            share.alloc_kvcache(TINY, 1 << 14, 512)  # a page for each K and V
    finally:
        share.client.close()
        Device.unlink(namespace, "host:0")


# --- a share in the device -------------------------------------------------------------------


@pytest.fixture
def share(device: Device, namespace: str) -> Iterator[Callable[..., DeviceShare]]:
    made: list[DeviceShare] = []

    def make(name: str = "engine", **settings: int) -> DeviceShare:
        given = Settings("host:0", namespace=namespace, **settings)  # type: ignore[arg-type]
        made.append(DeviceShare(given, name))
        return made[-1]

    yield make
    for one in made:
        one.client.close()


def test_static_memory_is_what_was_said_or_else_measured(
    device: Device, share: Callable[..., DeviceShare]
) -> None:
    share("measured").lease_static(3 * PAGE)
    share("said", static_bytes=5 * PAGE).lease_static(3 * PAGE)
    static = {client.name: client.static_bytes for client in device.usage().clients}
    assert static == {"measured": 3 * PAGE, "said": 5 * PAGE}
    with pytest.raises(
        NoRoomError, match=r"heavy needs 128 MiB in addition to its KV.*KVCACHED_STATIC"
    ):
        share("heavy").lease_static(2 * CAPACITY)


def test_one_request_is_guaranteed_unless_something_else_is_said(
    device: Device, share: Callable[..., DeviceShare]
) -> None:
    share("usual").alloc_kvcache(TINY, num_tokens=1 << 14, request_tokens=1000)
    share("little", min_bytes=QUANTUM).alloc_kvcache(TINY, 1 << 14, request_tokens=1000)
    minimum = {client.name: client.min_bytes for client in device.usage().clients}
    assert minimum == {"usual": TINY.need_bytes(1000, PAGE), "little": QUANTUM}


def test_a_request_that_cannot_be_guaranteed_names_what_to_change(
    share: Callable[..., DeviceShare],
) -> None:
    with pytest.raises(NoRoomError, match=r"one request of 1000000 tokens needs .*shorten"):
        share().alloc_kvcache(TINY, 1 << 20, request_tokens=1_000_000)
    with pytest.raises(NoRoomError, match="KVCACHED_LIMIT is 512 KiB: raise the limit"):
        share(limit_bytes=512 << 10).alloc_kvcache(TINY, 1 << 14, request_tokens=1000)
    with pytest.raises(NoRoomError, match=r"KVCACHED_MINIMUM needs 96 MiB.*or lower it"):
        share(min_bytes=96 << 20).alloc_kvcache(TINY, 1 << 14, request_tokens=1000)


class Idle:
    """Another engine. Its prefix cache fills the device, and its loop answers requests."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.kv = client.alloc_kvcache(TINY, num_tokens=1 << 18, reserved_blocks=0)
        blocks = self.kv.alloc_kv(self.kv.available_blocks())
        assert blocks is not None
        self.cache = Cache(self.kv, blocks)
        client.publish_evictable(self.kv.evictable_bytes(self.cache))
        self._end = threading.Event()
        self._loop = threading.Thread(target=self._answer)
        self._loop.start()

    def _answer(self) -> None:
        while not self._end.wait(0.001):
            self.client.answer_requests(lambda size: self.kv.shrink(size, self.cache))

    def end(self) -> None:
        self._end.set()
        self._loop.join()


@pytest.fixture
def idle(device: Device) -> Iterator[Callable[[], Idle]]:
    made: list[Idle] = []

    def make() -> Idle:
        made.append(Idle(device.client("idle")))
        return made[-1]

    yield make
    for one in made:
        one.end()
        one.client.close()


def test_a_step_finds_room_where_another_engine_is_idle(
    share: Callable[..., DeviceShare], idle: Callable[..., Idle]
) -> None:
    engine = share()
    kv = engine.alloc_kvcache(TINY, 1 << 14, request_tokens=16)
    idle()
    assert kv.alloc_kv(100) is None
    ids = engine.find_room(kv, 100)
    assert ids is not None
    assert len(ids) == 100


def test_a_step_finds_the_room_that_is_there_without_others(
    share: Callable[..., DeviceShare],
) -> None:
    """Covers a rank that has room: it is asked since another rank's device is full."""
    engine = share()
    kv = engine.alloc_kvcache(TINY, 1 << 14, request_tokens=16)
    ids = engine.find_room(kv, 100)
    assert ids is not None
    assert len(ids) == 100


def test_a_request_that_waits_asks_without_waiting(
    share: Callable[..., DeviceShare], idle: Callable[..., Idle], device: Device
) -> None:
    engine = share()
    kv = engine.alloc_kvcache(TINY, 1 << 14, request_tokens=16)
    other = idle()
    engine.ask_for(4 * QUANTUM)
    while other.client.usage().given_bytes < 4 * QUANTUM:
        pass  # the test's time limit ends it
    assert kv.alloc_kv(16) is not None


def test_a_limited_engine_asks_nobody_for_more_than_its_limit(
    share: Callable[..., DeviceShare], idle: Callable[..., Idle]
) -> None:
    limited = share("limited", limit_bytes=2 * QUANTUM)
    kv = limited.alloc_kvcache(TINY, 1 << 14, request_tokens=16)
    other = idle()
    limited.ask_for(4 * QUANTUM)
    assert limited.find_room(kv, 100) is None
    assert other.client.usage().given_bytes == other.client.usage().asked_bytes == 0


@pytest.mark.parametrize(("limit", "given"), [(None, 6), (4, 4 - 1)])
def test_what_would_be_of_use_is_asked_for_as_far_as_the_limit(
    share: Callable[..., DeviceShare], idle: Callable[..., Idle], limit: int | None, given: int
) -> None:
    engine = share("engine", limit_bytes=limit and limit * QUANTUM)
    kv = engine.alloc_kvcache(TINY, 1 << 14, request_tokens=16)
    other = idle()
    engine.ask_for(QUANTUM, 5 * QUANTUM)
    while other.client.usage().asked_bytes or not other.client.usage().given_bytes:
        pass  # the test's time limit ends it
    assert other.client.usage().given_bytes == given * QUANTUM
    assert kv.mapped_bytes() == QUANTUM  # the padding's, within the limit too


def test_room_that_nobody_can_make_is_not_waited_for(
    share: Callable[..., DeviceShare], device: Device
) -> None:
    engine = share()
    kv = engine.alloc_kvcache(TINY, 1 << 14, request_tokens=16)
    with device.client("busy") as busy:
        other = busy.alloc_kvcache(TINY, num_tokens=1 << 18, reserved_blocks=0)
        assert other.alloc_kv(other.available_blocks()) is not None
        assert engine.find_room(kv, 100) is None
        assert engine.find_room(kv, 1 << 40) is None  # more than it has addresses for
        assert busy.usage().asked_bytes == 0


def test_layouts_of_engines_need_not_be_tiny(share: Callable[..., DeviceShare]) -> None:
    layout = Layout(3, 2, 32, v_head_dim=64, dtype="float16", block_tokens=64)
    kv = share().alloc_kvcache(layout, num_tokens=1 << 12, request_tokens=128)
    assert kv.available_blocks() >= 2
