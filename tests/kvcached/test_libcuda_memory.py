"""Device memory of the test libcuda: inaccessible to the CPU, undefined when fresh, and accessible
to kernels only as far as the driver granted it."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator

import pytest

from .driver import INVALID_VALUE, READ_ONLY, UNIT, Driver, mapped, open_driver, run_with, u64
from .libcuda import LibCuda


@pytest.fixture
def driver(libcuda: LibCuda) -> Iterator[Driver]:
    with open_driver(libcuda) as made:
        yield made


TOUCH = {
    "mapped memory": """
with mapped(driver, PAGE) as (address, _):
    driver.fill(address, 7, PAGE)
    print(driver.read(address, 1), flush=True)
    ctypes.string_at(address, 1)
""",
    "plain memory": """
address = driver.allocate(PAGE)[1]
driver.fill(address, 7, PAGE)
print(driver.read(address, 1), flush=True)
ctypes.memset(address, 1, 1)
""",
    "the view of an unmapped page": """
with mapped(driver, PAGE) as (address, _):
    driver.fill(address, 7, PAGE)
    view = driver.view(address, PAGE)
    print(ctypes.string_at(view, 1), flush=True)
ctypes.string_at(view, 1)
""",
    "the view of freed memory": """
address = driver.allocate(PAGE)[1]
view = driver.view(address, PAGE)
driver.fill(address, 7, PAGE)
print(ctypes.string_at(view, 1), flush=True)
driver.free_plain(address)
ctypes.string_at(view, 1)
""",
    "a hole": """
with mapped(driver, PAGE) as (address, _):
    driver.fill(address, 7, PAGE)
    view = driver.view(address, PAGE)
    print(ctypes.string_at(view, 1), flush=True)
    ctypes.string_at(view + PAGE, 1)
""",
    "read-only memory, with a write": """
with mapped(driver, PAGE) as (address, _):
    driver.fill(address, 7, PAGE)
    driver.set_access(address, PAGE, flags=1)
    view = driver.view(address, PAGE)
    print(ctypes.string_at(view, 1), flush=True)
    ctypes.memset(view, 1, 1)
""",
    "a parent's memory, after a fork": """
with mapped(driver, PAGE) as (address, _):
    driver.fill(address, 7, PAGE)
    view = driver.view(address, PAGE)
    print(ctypes.string_at(view, 1), flush=True)
    if (child := os.fork()) == 0:
        ctypes.string_at(view, 1)
    os.kill(os.getpid(), os.waitpid(child, 0)[1] & 0x7F)
""",
}


@pytest.mark.parametrize("what", TOUCH)
def test_the_cpu_faults_on(what: str, libcuda: LibCuda) -> None:
    done = run_with(libcuda, "driver = Driver(libcuda)\n" + TOUCH[what])
    assert done.stdout == "b'\\x07'\n", done.stderr
    assert done.returncode == -signal.SIGSEGV


def test_a_kernel_sees_what_copies_see(driver: Driver) -> None:
    distance = driver.cu.test_cuda_kernel_distance
    distance.restype = ctypes.c_uint64
    plain = driver.allocate(UNIT)[1]
    with mapped(driver, 2 * UNIT) as (address, _):
        for start in (address, plain):
            view = driver.view(start, UNIT, writes=True)
            assert view == start + distance()
            assert view is not None
            ctypes.memset(view + 1, 5, 1)
            assert driver.fill(start, 4, 1) == 0
            assert driver.read(start, 2) == ctypes.string_at(view, 2) == b"\x04\x05"
    assert driver.free_plain(plain) == 0


def test_a_kernel_that_breaks_a_rule_gets_its_name(driver: Driver) -> None:
    with mapped(driver) as (address, handle):
        assert driver.view(address, 2 * UNIT) is None
        assert "a hole" in driver.refusal()
        assert driver.map(address + UNIT, UNIT, handle) == 0
        assert driver.view(address, 2 * UNIT) is None
        assert "no access yet" in driver.refusal()
        assert driver.set_access(address + UNIT, UNIT, flags=READ_ONLY) == 0
        assert driver.view(address, 2 * UNIT) is not None
        assert driver.view(address, 2 * UNIT, writes=True) is None
        assert "read-only" in driver.refusal()
        assert driver.fill(address + UNIT, 1, 1) == INVALID_VALUE
        assert driver.cu.cuMemcpyHtoD_v2(*u64(address + UNIT), b"x", *u64(1)) == INVALID_VALUE
        assert driver.unmap(address + UNIT, UNIT) == 0
    assert driver.view(address, 1) is None
    plain = driver.allocate(UNIT + 1)[1]
    assert driver.view(plain, UNIT + 1, writes=True) is not None
    assert driver.view(plain, UNIT + 2) is None
    assert driver.free_plain(plain) == 0


def test_there_is_no_view_without_init(libcuda: LibCuda) -> None:
    done = run_with(libcuda, "print(cu.test_cuda_kernel_view(*u64(1 << 40, 1), 0))")
    assert done.stdout == "0\n", done.stderr


def fresh(driver: Driver, size: int) -> list[bytes]:
    """Returns the content of two new allocations of each kind."""
    contents = []
    for _ in range(2):
        with mapped(driver, size) as (address, _):
            contents.append(driver.read(address, size))
        plain = driver.allocate(size)[1]
        contents.append(driver.read(plain, size))
        assert driver.free_plain(plain) == 0
    return contents


def test_fresh_memory_holds_garbage(driver: Driver) -> None:
    contents = fresh(driver, 3 * UNIT)
    assert len(set(contents)) == len(contents)
    for content in contents:
        assert 0 not in content
        assert len(set(content)) > 200
        assert len({content[:UNIT], content[UNIT : 2 * UNIT], content[2 * UNIT :]}) == 3


def test_only_what_was_written_is_known_again(driver: Driver) -> None:
    """Pages of other handles do not get the content of a released handle's page."""
    with mapped(driver) as (address, _):
        assert driver.fill(address, 0, UNIT) == 0
    assert all(0 not in content for content in fresh(driver, UNIT))


def test_garbage_can_be_left_out(libcuda: LibCuda) -> None:
    code = "driver = Driver(libcuda)\nprint(any(driver.read(driver.allocate(PAGE)[1], PAGE)))"
    assert run_with(libcuda, code, KVCACHED_TEST_CUDA_GARBAGE="0").stdout == "False\n"
    assert run_with(libcuda, code).stdout == "True\n"


def test_mappings_may_take_memory_of_the_drivers(libcuda: LibCuda) -> None:
    """Takes memory once for each 16 MiB of addresses, until the context is destroyed."""
    code = """
driver, span = Driver(libcuda), 16 * MEGABYTE
free, start = driver.free_bytes(), driver.reserve(2 * span, span)[1]
for address in (start, start + PAGE, start + span, start):
    handle = driver.create(PAGE)[1]
    assert driver.map(address, PAGE, handle) == 0
    print((free - driver.free_bytes()) / MEGABYTE)
    assert driver.unmap(address, PAGE) == driver.release(handle) == 0
driver.leave()
print(Driver(libcuda).free_bytes() - free)
"""
    done = run_with(libcuda, code, KVCACHED_TEST_CUDA_TABLE_BYTES=str(1 << 20))
    assert done.stdout.split() == ["3.0", "3.0", "4.0", "4.0", "0"], done.stderr


def test_plain_memory_takes_whole_pages(libcuda: LibCuda) -> None:
    code = """
driver = Driver(libcuda)
before = driver.free_bytes()
allocated = [driver.allocate(size)[1] for size in (1, PAGE, PAGE + 1)]
print((before - driver.free_bytes()) // PAGE)
for one in allocated:
    assert driver.free_plain(one) == 0
print(before == driver.free_bytes())
"""
    assert run_with(libcuda, code).stdout.split() == ["4", "True"]
