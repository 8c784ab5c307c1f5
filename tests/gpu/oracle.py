"""Driver through NVIDIA's bindings (`pip install cuda-bindings`)."""

from __future__ import annotations

from typing import Any

DEVICE = 0


class Oracle:
    """Reader of device 0 in its primary context."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.call(driver.cuInit(0))
        self.device = self.call(driver.cuDeviceGet(DEVICE))
        self.context = self.call(driver.cuDevicePrimaryCtxRetain(self.device))
        self.call(driver.cuCtxPushCurrent(self.context))

    def call(self, outcome: tuple[Any, ...]) -> Any:
        """Returns the values of a call that must succeed."""
        result, *values = outcome
        assert result == self.driver.CUresult.CUDA_SUCCESS, result
        return values[0] if len(values) == 1 else values

    def location(self) -> Any:
        location = self.driver.CUmemLocation()
        location.type = self.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = DEVICE
        return location

    def granularity_bytes(self) -> int:
        prop = self.driver.CUmemAllocationProp()
        prop.type = self.driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location = self.location()
        kinds = self.driver.CUmemAllocationGranularity_flags
        minimum = kinds.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return self.call(self.driver.cuMemGetAllocationGranularity(prop, minimum))

    def can_access(self, address: int) -> bool:
        result, flags = self.driver.cuMemGetAccess(self.location(), address)
        granted = self.driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return result == self.driver.CUresult.CUDA_SUCCESS and flags == int(granted)

    def access(self, address: int) -> int:
        """Returns 0 if nothing is accessible, 1 for reading, 3 for reading and writing."""
        result, flags = self.driver.cuMemGetAccess(self.location(), address)
        return int(flags) if result == self.driver.CUresult.CUDA_SUCCESS else 0

    def stream(self) -> int:
        """Returns the handle of a new stream, which lives as long as the context."""
        flags = self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self.call(self.driver.cuStreamCreate(int(flags))))

    def fill_behind(self, stream: int, address: int, value: int, size_bytes: int) -> None:
        """Submits a fill to a stream without waiting for it."""
        self.call(self.driver.cuMemsetD8Async(address, value, size_bytes, stream))

    def synchronise(self, stream: int) -> None:
        self.call(self.driver.cuStreamSynchronize(stream))

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        """Fills memory and waits until that is done, since an unmap does not wait for it."""
        self.call(self.driver.cuMemsetD8(address, value, size_bytes))
        self.call(self.driver.cuCtxSynchronize())

    def read(self, address: int) -> int:
        byte = bytearray(1)
        self.call(self.driver.cuMemcpyDtoH(byte, address, 1))
        return byte[0]

    def free_bytes(self) -> int:
        return self.call(self.driver.cuMemGetInfo())[0]
