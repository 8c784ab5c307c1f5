"""Mappings of kvcached, read back through NVIDIA's Python bindings.

The bindings know the driver's structures from its headers; kvcached declares them itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from kvcached import Device

from .oracle import Oracle

PAGE = 2 << 20
DRIVERS_OWN = 2 * PAGE  # for page tables that it may allocate in between

pytestmark = pytest.mark.usefixtures("gpu")


@pytest.fixture
def oracle() -> Oracle:
    return Oracle(pytest.importorskip("cuda.bindings.driver"))


@pytest.fixture
def mapped(oracle: Oracle) -> Iterator[Any]:
    """Yields a tensor of 8 pages, of which pages 2 to 4 are mapped."""
    namespace = f"oracle{uuid4().hex[:8]}"
    device = Device.open("cuda:0", capacity_bytes=64 * PAGE, page_bytes=PAGE, namespace=namespace)
    with device.client("seen") as client:
        tensor = client.alloc_virtual_tensor(8 * PAGE)
        tensor.map(2 * PAGE, 3 * PAGE)
        yield tensor
    device.destroy()


def test_it_sees_pages_and_holes(oracle: Oracle, mapped: Any) -> None:
    address = mapped.view([1], "uint8").address
    assert PAGE % oracle.granularity_bytes() == 0
    seen = [oracle.can_access(address + page * PAGE) for page in range(8)]
    assert seen == [False, False, True, True, True, False, False, False]
    mapped.unmap(3 * PAGE, PAGE)
    assert not oracle.can_access(address + 3 * PAGE)
    assert oracle.can_access(address + 4 * PAGE)


def test_it_writes_and_reads_there(oracle: Oracle, mapped: Any) -> None:
    address = mapped.view([1], "uint8", 2 * PAGE).address
    oracle.fill(address, 7, 3 * PAGE)
    assert oracle.read(address + 3 * PAGE - 1) == 7


def test_memory_is_taken_and_given_back(oracle: Oracle, mapped: Any) -> None:
    free_before = oracle.free_bytes()
    mapped.map(5 * PAGE, 3 * PAGE)
    taken = free_before - oracle.free_bytes()
    assert 3 * PAGE <= taken <= 3 * PAGE + DRIVERS_OWN
    mapped.unmap(5 * PAGE, 3 * PAGE)
    assert abs(oracle.free_bytes() - free_before) <= DRIVERS_OWN
