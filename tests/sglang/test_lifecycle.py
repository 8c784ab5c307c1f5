"""Repeated activations in one process: bad files, requests cut off, memory given back to the OS."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import msgspec
import pytest

from prism.messages.engine import (
    ActivateEngine,
    ActivationFailed,
    Deactivate,
    Deactivated,
    Shutdown,
    Submit,
)
from prism.messages.requests import Cancel
from tests.engines.harness import DeviceUnderTest, request
from tests.sglang.conftest import kv_committed_bytes, ledger_of
from tests.sglang.models import LLAMA, QWEN3, greedy, path_of, prompts, spec_of

pytestmark = pytest.mark.sglang


def resident_bytes(device: DeviceUnderTest) -> int:
    pages = int(Path(f"/proc/{device.pids['e0']}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def serve_one(device: DeviceUnderTest, model: str, name: str) -> None:
    [prompt] = prompts(model, 1, (50, 50))
    device.send(Submit([request(name, model, prompt)]))
    [stream] = device.finish(name)
    assert stream.token_ids == greedy(model, prompt, 16)


def deactivate(device: DeviceUnderTest) -> None:
    device.send(Deactivate())
    device.wait_for(Deactivated)


def test_memory_stays_flat_over_many_activations(device: DeviceUnderTest) -> None:
    """Grows by far less than one model's weights, however often models are activated."""
    resident = []
    for turn in range(6):
        model = (QWEN3, LLAMA)[turn % 2]
        device.activate(spec_of(model))
        serve_one(device, model, f"flat{turn}")
        deactivate(device)
        resident.append(resident_bytes(device))
    assert max(resident[2:]) - resident[1] < spec_of(QWEN3).weight_bytes / 4


@pytest.mark.parametrize("damage", ["truncated weights", "no weights", "unknown architecture"])
def test_bad_files_leave_a_process_that_serves_the_next_model(
    device: DeviceUnderTest, tmp_path: Path, damage: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(path_of(LLAMA), broken)
    weights, config = broken / "model.safetensors", broken / "config.json"
    match damage:
        case "truncated weights":
            weights.write_bytes(weights.read_bytes()[:100_000])
        case "no weights":
            weights.unlink()
        case "unknown architecture":
            config.write_text(config.read_text().replace("LlamaForCausalLM", "NoSuchForCausalLM"))
    device.send(ActivateEngine(msgspec.structs.replace(spec_of(LLAMA), path=str(broken))))
    failed = device.wait_for(ActivationFailed)
    assert failed.model == LLAMA
    assert failed.missing_bytes == 0
    assert ledger_of(device).usage().reserved_bytes == 0
    device.activate(spec_of(LLAMA))
    serve_one(device, LLAMA, f"after {damage}")
    deactivate(device)


def test_a_specification_that_does_not_match_the_files_is_refused(device: DeviceUnderTest) -> None:
    wrong = msgspec.structs.replace(spec_of(LLAMA), num_kv_heads=2)
    device.send(ActivateEngine(wrong))
    assert "KV layout mismatch" in device.wait_for(ActivationFailed).message
    assert ledger_of(device).usage().reserved_bytes == 0


def test_a_limit_below_one_request_is_refused(device: DeviceUnderTest) -> None:
    device.send(ActivateEngine(spec_of(LLAMA), kv_limit_bytes=1 << 20))
    assert "context_length" in device.wait_for(ActivationFailed).message
    assert ledger_of(device).usage().reserved_bytes == 0


def test_requests_cut_off_by_deactivation_fail_and_their_memory_returns(
    device: DeviceUnderTest,
) -> None:
    device.activate(spec_of(LLAMA))
    asked = {f"cut{i}": p for i, p in enumerate(prompts(LLAMA, 4, (30, 60)))}
    device.send(Submit([request(i, LLAMA, p, 1500) for i, p in asked.items()]))
    device.wait_until(lambda: device.stream("cut0").chunks)
    deactivate(device)
    failures = [s.failure for s in device.finish(*asked)]
    assert all(f and f.code == "model_evicted" and f.retryable for f in failures)
    assert ledger_of(device).usage().reserved_bytes == 0
    device.activate(spec_of(LLAMA))
    serve_one(device, LLAMA, "after the cut")
    deactivate(device)


def test_a_prompt_is_cancelled_between_its_chunks(device: DeviceUnderTest) -> None:
    floor = device.activate(spec_of(LLAMA)).floor_bytes
    [prompt] = prompts(LLAMA, 1, (2000, 2000))
    device.send(Submit([request("half", LLAMA, prompt)]))
    while kv_committed_bytes(device) <= 2 * floor:
        time.sleep(0.001)
    device.send(Cancel(["half"]))
    [stream] = device.finish("half")
    assert (stream.token_ids, stream.finish_reason) == ([], "cancelled")
    serve_one(device, LLAMA, "after the half")
    deactivate(device)


def test_the_process_has_no_port_that_others_can_reach(device: DeviceUnderTest) -> None:
    """Process groups of one rank listen on loopback; SGLang's own sockets are absent."""
    device.activate(spec_of(LLAMA))
    directory = Path(f"/proc/{device.pids['e0']}")
    links = [os.readlink(fd) for fd in (directory / "fd").iterdir() if fd.exists()]
    sockets = {link[8:-1] for link in links if link.startswith("socket:")}
    listening = [
        line.split()[1]
        for line in (directory / "net/tcp").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[9] in sockets
    ]
    assert all(address.startswith("0100007F:") for address in listening)  # 127.0.0.1
    deactivate(device)


def test_shutdown_ends_the_process(device: DeviceUnderTest) -> None:
    device.activate(spec_of(LLAMA))
    device.send(Shutdown())
    assert device.exited().status == 0
    assert ledger_of(device).usage().clients == ()
