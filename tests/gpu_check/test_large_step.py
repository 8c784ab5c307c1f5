"""Room for the step "large" of scripts/gpu-check, and the files of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from lab.gpu_check.report import DOUBLES_VARIABLE, Skip
from lab.gpu_check.serving import large, large_model, shard
from lab.gpu_check.sizes import GIB, Sizes
from tests.gpu_check.steps import LARGE, report_in


def test_the_large_model_has_eight_billion_parameters() -> None:
    assert large_model.size_of(large.SHAPE) == 2 * 8_030_261_248


@pytest.mark.parametrize(
    ("free_gib", "shm_gib", "says"),
    [
        (27, 60, "27 GiB of the GPU are free, and 28 are needed"),
        (70, 31, "files and store need 32: mount -o remount,size=63G /dev/shm"),
        (70, 0, "/dev/shm has 0 GiB free"),
    ],
)
def test_too_small_a_machine_is_a_line(free_gib: int, shm_gib: int, says: str) -> None:
    with pytest.raises(Skip, match=says):
        large.require_room(Sizes(free_gib * GIB, shm_gib * GIB), large_model.size_of(large.SHAPE))
    large.require_room(Sizes(70 * GIB, 33 * GIB), large_model.size_of(large.SHAPE))


@pytest.mark.parametrize(
    ("written", "available_gib", "says"),
    [
        ({"short": "500 MiB left"}, 100, "do not fit into the machine's memory: 500 MiB left"),
        ({"bytes": 16 * GIB, "memory_grew": False}, 10, "10240 MiB of memory are left"),
        ({"bytes": 16 * GIB, "memory_grew": True}, 10, ""),
        ({"bytes": 16 * GIB, "memory_grew": False}, 20, ""),
    ],
)
def test_memory_that_does_not_suffice_is_a_line(
    written: dict[str, Any],
    available_gib: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv(DOUBLES_VARIABLE, raising=False)
    monkeypatch.setattr(large, "helper", lambda *_: {"short": "", "write_s": 4.0} | written)
    monkeypatch.setattr(large, "available_bytes", lambda: available_gib * GIB)
    report = report_in(tmp_path, "large")
    with report.check("written"):
        large.write(report, {}, tmp_path, large.SHAPE)
    assert says in report.checks["written"]
    assert report.checks["written"].startswith("skipped" if says else "passed")


def test_the_files_go_also_after_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    seen: list[Path] = []

    def write(_env: dict[str, str], _module: str, folder: str, _shape: str) -> dict[str, Any]:
        Path(folder).mkdir(parents=True)
        (Path(folder) / "model.safetensors").write_bytes(b"x")
        seen.append(Path(folder))
        return {"short": "", "bytes": 1, "write_s": 1.0, "memory_grew": False}

    def fail(*_given: Any) -> Any:
        assert seen[0].exists()
        raise ValueError("no engine")

    monkeypatch.setenv(DOUBLES_VARIABLE, "1")
    monkeypatch.setattr(large, "SHM", shm)
    monkeypatch.setattr(large, "sizes_and_environment", lambda _: (LARGE, {}))
    monkeypatch.setattr(large, "helper", write)
    monkeypatch.setattr(large, "run_check", fail)
    report = report_in(tmp_path, "large")
    large.body(report)
    assert "ValueError: no engine" in report.checks["served"]
    assert seen[0].is_relative_to(shm)
    assert not seen[0].exists()


# --- files -----------------------------------------------------------------------------------


def test_the_head_of_a_file_says_where_tensors_lie() -> None:
    import torch

    tensors = {"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(2).bfloat16()}
    head, size_bytes = shard.header_of(tensors)
    found = load(head + bytes(range(size_bytes)))
    assert found.keys() == tensors.keys()
    assert found["b"].shape == (2,)
    assert found["b"].view(torch.uint8).tolist() == [30, 31, 32, 33]
    assert len(head) % 8 == 0


def test_writing_waits_for_memory_and_then_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([GIB, GIB, 3 * GIB])
    shard.await_memory(lambda: next(left))  # a virtual machine that grows
    assert next(left, None) is None
    monkeypatch.setattr(shard, "_GROWS_S", 0.1)
    with pytest.raises(shard.MemoryShort, match="1024 MiB"):
        shard.await_memory(lambda: GIB)
    assert 0 < shard.available_bytes() <= shard.meminfo("MemTotal")
