"""Devices survive a fork. Clients do not, and their errors in the child say what to do."""

from __future__ import annotations

import pytest

from kvcached import Device

from .conftest import Spawn


def test_fork(device: Device, spawn: Spawn) -> None:
    said, _ = spawn("fork").communicate(timeout=60)
    assert said.splitlines() == ["child 5 child parent", "parent 7.0 [1]"]
    assert device.usage().clients == ()


@pytest.mark.parametrize("device_name", ["cuda:0"])
def test_fork_with_a_gpu(device: Device, spawn: Spawn) -> None:
    said, _ = spawn("fork_with_gpu").communicate(timeout=60)
    *child, parent = said.splitlines()
    assert parent == "parent 7.0 [1]"
    assert len(child) == 3
    assert all("does not survive a fork" in line for line in child)
    assert device.usage().clients == ()


@pytest.mark.parametrize("device_name", ["cuda:0"])
def test_opening_a_gpu_device_does_not_touch_cuda(device: Device, spawn: Spawn) -> None:
    """Allows a fork server to open devices: only clients may initialise the driver."""
    said, _ = spawn("fork_then_open").communicate(timeout=60)
    assert said.splitlines() == ["child 1"]
