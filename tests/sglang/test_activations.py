"""Many activations in one process: memory does not grow, and every answer is right."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvcached
from prism.engines.core import EngineContext
from prism.engines.timeline import STAGE_VARIABLE
from prism.messages.engine import ActivateEngine, Deactivate, Deactivated, Submit
from tests.engines.harness import DeviceUnderTest, request
from tests.sglang.conftest import DEVICE, config_of, ledger_of, opened_device
from tests.sglang.models import GEMMA3, GPT2, LLAMA, MOE, QWEN3, greedy, prompts, spec_of

pytestmark = pytest.mark.sglang

MODELS = (LLAMA, QWEN3, GPT2, MOE.name, GEMMA3.name)
STAGES = ("shrink", "reserve", "store", "layout", "weights", "build", "warm_up", "keep")


@pytest.fixture(params=[False, True], ids=["files", "store"])
def stored(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def own_device(stored: bool, tmp_path: Path) -> Iterator[DeviceUnderTest]:
    with opened_device(256 << 20, weight_store=str(tmp_path / "store") if stored else "") as device:
        device.fork()
        yield device


def held(device: DeviceUnderTest) -> tuple[int, int]:
    """Returns the resident bytes of the engine's process and its number of open files."""
    process = Path(f"/proc/{device.pids['e0']}")
    pages = int((process / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(list((process / "fd").iterdir()))


def take_turns(device: DeviceUnderTest, turns: int) -> None:
    """Activates each model in turn; compares the output of one request each with transformers'."""
    asked = {name: prompts(name, 1, (40, 40))[0] for name in MODELS}
    expected = {name: greedy(name, asked[name], 12) for name in MODELS}
    seen = []
    for turn in range(turns):
        name = MODELS[turn % len(MODELS)]
        device.activate(spec_of(name))
        device.send(Submit([request(f"t{turn}", name, asked[name], 12)]))
        [stream] = device.finish(f"t{turn}")
        assert stream.token_ids == expected[name], (turn, name)
        device.send(Deactivate())
        device.wait_for(Deactivated)
        usage = ledger_of(device).usage()
        assert (usage.reserved_bytes, ledger_of(device).resident_bytes()) == (0, 0)
        seen.append(held(device))
    warm = 2 * len(MODELS)
    resident, files = zip(*seen[warm - 1 :], strict=True)
    assert max(files) == files[0]
    # Caches of SGLang fill slowly; a model's weights (8 MB and more) would show at once.
    assert max(resident) - resident[0] < 4 << 20


def test_five_architectures_take_turns(own_device: DeviceUnderTest) -> None:
    take_turns(own_device, 15)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_hundred_activations(own_device: DeviceUnderTest) -> None:
    take_turns(own_device, 200)


def die_in(stage: str, config: Any) -> int:
    """Returns the exit status of a child that kills itself during an activation."""
    pid = os.fork()
    if pid == 0:
        os.environ[STAGE_VARIABLE] = stage
        try:
            from prism.engines.sglang import create

            create(EngineContext("e0", DEVICE, config)).activate(ActivateEngine(spec_of(LLAMA)))
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_killed_in_each_stage_everything_returns(stored: bool, tmp_path: Path) -> None:
    """Locks of the store are freed with the memory: the next process finds whole copies or none."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="prism-") as directory:
        warnings.simplefilter("ignore")
        from prism.engines.sglang import create, preload

        preload()
        gc.collect()
        config = config_of(Path(directory), 256 << 20)
        store = str(tmp_path / "store") if stored else ""
        engine = msgspec.structs.replace(config.engine, weight_store=store)
        config = msgspec.structs.replace(config, engine=engine)
        device = kvcached.Device.open(
            DEVICE, capacity_bytes=256 << 20, page_bytes=64 << 10, namespace=config.namespace
        )
        for stage in STAGES:
            assert die_in(stage, config) == -signal.SIGKILL, stage
            device.reap()
            usage = device.usage()
            assert (usage.reserved_bytes, usage.clients, device.resident_bytes()) == (0, (), 0)
        core = create(EngineContext("e0", DEVICE, config))
        core.activate(ActivateEngine(spec_of(LLAMA)))
        core.close()
        device.destroy()
