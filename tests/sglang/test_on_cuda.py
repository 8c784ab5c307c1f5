"""Tests of the adapter on the test double of torch's CUDA front, in a separate process.

Here are the tests that need tensors on a device. `tests/torchcuda` has the whole life of models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.sglang.on_cuda import facts_of

pytestmark = pytest.mark.sglang

SCRIPT = """
    import ctypes, os
    from prism.messages.engine import ActivateEngine
    from tests.sglang.models import spec_of

    # Little is free when the model comes up.
    usage = life.ledger.usage()
    hog = life.ledger.client("hog")
    lease = hog.reserve_static(usage.free_bytes - (1400 << 20), "neighbour")
    named = []
    set_streams = core._client.set_streams
    core._client.set_streams = lambda handles: (named.append(handles), set_streams(handles))
    life.activate(LLAMA)
    del core._client.set_streams
    scheduler, plan = core._active.scheduler, core._active.memory.plan
    allocator = scheduler.token_to_kv_pool_allocator
    facts["tokens"] = [allocator.get_kvcache().size, plan.pool_tokens]
    facts["free_tokens"] = life.ledger.usage().free_bytes // plan.layout.token_bytes
    lease.release()
    hog.close()

    runner = scheduler.tp_worker.model_runner
    streams = [torch.cuda.current_stream(), torch.cuda.default_stream(), runner.forward_stream]
    streams += [scheduler.schedule_stream, scheduler.copy_stream]
    facts["streams"] = sorted({stream.cuda_stream for stream in streams})
    facts["named"] = sorted(named[-1])

    # How often the allocator waits for the device.
    driver = ctypes.CDLL(os.environ["KVCACHED_LIBCUDA"])
    driver.test_cuda_calls.restype = ctypes.c_uint64
    waits = {"decode": 0, "calls": 0, "blocks": 0}
    alloc_decode = allocator.alloc_decode

    def counted(*arguments):
        before, live = driver.test_cuda_calls(b"cuStreamSynchronize"), allocator._live_pages
        slots = alloc_decode(*arguments)
        waits["decode"] += driver.test_cuda_calls(b"cuStreamSynchronize") - before
        waits["calls"] += 1
        waits["blocks"] += allocator._live_pages - live
        return slots

    allocator.alloc_decode = counted
    for index, prompt in enumerate(prompts(LLAMA, 2, (10, 14))):
        core.submit([request(LLAMA, f"r{index}", prompt, 0.0)])
    life.run()
    facts["waits"] = waits
    del allocator, alloc_decode, counted, scheduler, runner
    core.deactivate()
    facts["left"] = torch.cuda.memory_reserved(0)

    # torch gets less than the model's buffers take.
    adopt = gpu.adopt
    gpu.adopt = lambda client, device, cap_bytes: adopt(client, device, 3 << 20)
    try:
        core.activate(ActivateEngine(spec_of(LLAMA), max_running=4096))
    except Exception as error:
        facts["short"] = f"{type(error).__name__}: {error}"
    gpu.adopt = adopt
    facts["after"] = [torch.cuda.memory_reserved(0), life.ledger.usage().committed_bytes]
    life.activate(LLAMA)
"""

WINDOWS = """
    from tests.sglang.models import GEMMA3, greedy
    name = GEMMA3.name
    life.activate(name)
    pool = core._active.scheduler.token_to_kv_pool_allocator
    facts["windows"] = pool.get_kvcache().swa_layer_nums
    asked = prompts(name, 3, (5, 90))
    core.submit([request(name, str(i), prompt, 0.0) for i, prompt in enumerate(asked)])
    answers = life.run()
    facts["equal"] = [answers[str(i)] == greedy(name, asked[i], 12) for i in range(3)]
    del pool
    core.deactivate()
    facts["after"] = life.memory()
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("prism")
    return facts_of(SCRIPT, folder, "torch_native", "off")


def test_kv_is_not_capped_by_what_is_free_at_activation(facts: dict[str, Any]) -> None:
    laid_out, planned = facts["tokens"]
    assert laid_out == planned
    assert facts["free_tokens"] < planned


def test_freed_pages_wait_for_every_stream_of_sglangs(facts: dict[str, Any]) -> None:
    assert facts["named"] == facts["streams"]
    assert len(facts["named"]) > 1


def test_a_decode_steps_blocks_wait_for_nothing_on_the_device(facts: dict[str, Any]) -> None:
    assert facts["waits"]["calls"] > 0
    assert facts["waits"]["blocks"] > 0
    assert facts["waits"]["decode"] == 0


def test_torch_gives_its_memory_back_with_the_model(facts: dict[str, Any]) -> None:
    """Frees all but one segment of the smallest size, in which modules keep small tensors."""
    assert facts["left"] <= 2 << 20


def test_a_cap_that_is_too_small_is_named_and_leaves_nothing(facts: dict[str, Any]) -> None:
    assert facts["short"].startswith("ActivationError: model tiny-llama could not be loaded")
    assert "raise engine.static" in facts["short"]
    reserved_bytes, committed_bytes = facts["after"]
    assert reserved_bytes <= 2 << 20
    assert committed_bytes == 0


def test_a_model_with_windows_is_served_and_leaves_nothing(tmp_path: Path) -> None:
    facts = facts_of(WINDOWS, tmp_path, "torch_native", "off")
    assert facts["windows"] == 2
    assert facts["equal"] == [True] * 3
    assert facts["after"]["committed"] == facts["after"]["violations"] == 0
    assert facts["after"]["torch"] <= 2 << 20
