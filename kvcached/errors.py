"""Exceptions of kvcached.

KvcachedError
├── InvalidArgumentError (also ValueError)   a size, count or name that can never work
│   ├── AlignmentError                       not a multiple of the page size
│   └── UnknownDeviceError                   no such device name, or no ledger to attach to
│       └── HiddenDeviceError                CUDA_VISIBLE_DEVICES leaves no such GPU
├── NoRoomError                              expected: the device has no room for this client now
├── DeviceError
│   ├── BackendUnavailableError              the machine lacks what the backend needs
│   │   ├── NoDriverError                    NVIDIA's driver is missing or shows no GPU
│   │   ├── DriverTooOldError                NVIDIA's driver lacks calls that are needed
│   │   └── UnsupportedDeviceError           a GPU without virtual memory management, or a MIG part
│   ├── DeviceOccupiedError                  processes outside of the ledger hold its capacity
│   ├── DeviceMismatchError                  the ledger exists with other capacity or page size
│   ├── DeviceBusyError                      live clients keep the device from being destroyed
│   ├── DeviceGoneError                      the device was destroyed, or its ledger's file removed
│   ├── LedgerVersionError                   another library version made the ledger
│   ├── LedgerCorruptError                   the file is not a ledger, or is damaged
│   ├── LedgerPermissionError                the OS denies this user access
│   ├── SharedMemoryFullError                no space in /dev/shm for the ledger
│   ├── TooManyClientsError                  every client record of the ledger is taken
│   ├── UnknownClientError                   no live client of that name or process
│   └── AmbiguousClientError                 several clients of that name or process
├── MappingError
│   ├── AlreadyMappedError
│   ├── NotMappedError
│   ├── UnknownHandleError
│   ├── PagesInUseError                      the engine's streams may still touch the pages
│   └── StrandedPagesError                   a batch failed and could not be rolled back
├── BlockError
│   ├── UnknownBlockError                    an id that is not an allocatable block
│   └── DoubleFreeError                      an id that is not allocated, or named twice
├── HandoverError                            blocks of another process that cannot be fetched
├── WeightError
│   ├── WeightFileError                      a file of weights is missing, short or damaged
│   ├── WeightMismatchError                  the tensors differ from the expected ones
│   ├── StoreFullError                       the weight store is full and all entries are in use
│   └── LoadCancelledError                   the caller cancelled the load
├── ClosedError                              the object was closed or freed before
├── ForkedClientError                        the object, or CUDA, belongs to the parent process
├── SystemCallError                          the OS or the driver refused a call
├── InternalError                            a broken invariant: a bug in kvcached
├── ConflictingPackageError (also ImportError)   another package of the same name is installed
└── UncompiledCheckoutError (also ImportError)   Python found a checkout, not the installed package

A call that raises has changed nothing, except StrandedPagesError: its pages stay charged and are
given back when the KV cache, tensor or client is closed.
"""

from __future__ import annotations

_BY_CODE: dict[str, type[KvcachedError]] = {}


class KvcachedError(Exception):
    """Base of all exceptions of this package."""

    def __init_subclass__(cls, *, code: str | None = None) -> None:
        """Registers the class for `code`, a status of the C++ layers (csrc/status.h)."""
        super().__init_subclass__()
        if code is not None:
            _BY_CODE[code] = cls


class InvalidArgumentError(KvcachedError, ValueError, code="invalid_argument"):
    """A size, count or name that can never work."""


class AlignmentError(InvalidArgumentError, code="not_aligned"):
    """A size or offset that is not a multiple of the page size."""


class UnknownDeviceError(InvalidArgumentError, code="unknown_device"):
    """No such device name, or no ledger to attach to."""


class HiddenDeviceError(UnknownDeviceError, code="hidden_device"):
    """CUDA_VISIBLE_DEVICES leaves no such GPU."""


class NoRoomError(KvcachedError, code="no_room"):
    """The device has no room for this client now. Expected under load: free memory or wait.

    `need_bytes` were requested; `free_bytes` were available.
    """

    def __init__(self, message: str, need_bytes: int = 0, free_bytes: int = 0) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes

    def __reduce__(self) -> tuple[type[NoRoomError], tuple[str, int, int]]:
        return type(self), (str(self), self.need_bytes, self.free_bytes)


class DeviceError(KvcachedError):
    """The device or its ledger cannot be used."""


class BackendUnavailableError(DeviceError, code="unavailable"):
    """The machine lacks what the backend needs: for `cuda:N`, NVIDIA's driver or a GPU."""


class NoDriverError(BackendUnavailableError, code="no_driver"):
    """NVIDIA's driver is not installed, or shows no GPU."""


class DriverTooOldError(BackendUnavailableError, code="old_driver"):
    """NVIDIA's driver lacks calls that kvcached needs."""


class UnsupportedDeviceError(BackendUnavailableError, code="unsupported"):
    """A GPU without virtual memory management, or a part of one (MIG)."""


class DeviceOccupiedError(DeviceError):
    """Processes outside of the ledger hold memory that is part of its capacity."""


class DeviceMismatchError(DeviceError, code="mismatch"):
    """The ledger exists with another capacity or page size."""


class DeviceBusyError(DeviceError, code="busy"):
    """Live clients keep the device from being destroyed."""


class DeviceGoneError(DeviceError, code="gone"):
    """The device was destroyed, or its ledger's file was removed while clients used it."""


class LedgerVersionError(DeviceError, code="version"):
    """Another library version made the ledger."""


class LedgerCorruptError(DeviceError, code="corrupt"):
    """The file is not a ledger, or is damaged."""


class LedgerPermissionError(DeviceError, code="permission"):
    """The OS does not let this user use the ledger or read a client's memory figures."""


class SharedMemoryFullError(DeviceError, code="shm_full"):
    """No space in /dev/shm for the ledger."""


class TooManyClientsError(DeviceError, code="too_many_clients"):
    """Every client record of the ledger is taken."""


class UnknownClientError(DeviceError, code="unknown_client"):
    """No live client of that name or process."""


class AmbiguousClientError(DeviceError, code="ambiguous_client"):
    """Several clients of that name or process; name and pid together tell them apart."""


class MappingError(KvcachedError):
    """A map or unmap that the state of the range does not allow."""


class AlreadyMappedError(MappingError, code="already_mapped"):
    """Something is mapped in the range already."""


class NotMappedError(MappingError, code="not_mapped"):
    """Part of the range is not mapped."""


class UnknownHandleError(MappingError, code="unknown_handle"):
    """A page handle that was released or never created."""


class PagesInUseError(MappingError, code="in_use"):
    """The engine's streams still have work that may touch the pages; synchronise and try again."""


class StrandedPagesError(MappingError, code="stranded"):
    """A batch failed half way and could not be rolled back."""


class BlockError(KvcachedError):
    """A block id that cannot be freed."""


class UnknownBlockError(BlockError, code="unknown_block"):
    """An id that is not an allocatable block of this KV cache."""


class DoubleFreeError(BlockError, code="double_free"):
    """An id that is not allocated, or that one call names twice."""


class HandoverError(KvcachedError):
    """Blocks that another process offered cannot be fetched.

    The offer has ended, its process is gone, or its memory cannot be read here. The contents of the
    target blocks are undefined.
    """


class WeightError(KvcachedError):
    """Weights that cannot be read, stored or loaded."""


class WeightFileError(WeightError, code="weight_file"):
    """A file of weights is missing, short, damaged or changing; the message names it."""


class WeightMismatchError(WeightError):
    """Names, types or shapes of tensors differ from the expected ones."""


class StoreFullError(WeightError):
    """The weight store has no room and all of its entries are in use.

    `need_bytes` were requested; `missing_bytes` of them are not available.
    """

    def __init__(self, message: str, need_bytes: int = 0, missing_bytes: int = 0) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes
        self.missing_bytes = missing_bytes

    def __reduce__(self) -> tuple[type[StoreFullError], tuple[str, int, int]]:
        return type(self), (str(self), self.need_bytes, self.missing_bytes)


class LoadCancelledError(WeightError, code="cancelled"):
    """The caller cancelled a load or a read; none of its data is kept."""


class ClosedError(KvcachedError, code="closed"):
    """The object was closed or freed before."""


class ForkedClientError(KvcachedError, code="forked"):
    """The object, or all of CUDA, belongs to the parent process.

    Start a fresh process, or fork before CUDA is used.
    """


class SystemCallError(KvcachedError, code="system_call"):
    """The OS or the CUDA driver refused a call; the message names it and the error."""


class InternalError(KvcachedError, code="internal"):
    """A broken invariant: a bug in kvcached."""


class ConflictingPackageError(KvcachedError, ImportError):
    """Another distribution that provides the package `kvcached` is installed."""


class UncompiledCheckoutError(KvcachedError, ImportError):
    """Python found a checkout's sources of kvcached, and not the installed package."""


def from_status(code: str, message: str, need_bytes: int, free_bytes: int) -> KvcachedError:
    """Returns the exception for a status of the C++ layers, which call this function by name."""
    if code == "no_room":
        return NoRoomError(message, need_bytes, free_bytes)
    return _BY_CODE[code](message)
