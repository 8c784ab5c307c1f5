"""Every exception that kvcached raises.

KvcachedError
├── InvalidArgumentError (also ValueError)   a size, count or name that can never work
│   ├── AlignmentError                       not a multiple of the page size
│   └── UnknownDeviceError                   no such device name, or no ledger to attach to
├── NoRoomError                              expected: the device has no room for this client now
├── DeviceError
│   ├── BackendUnavailableError              the machine lacks what the backend needs
│   ├── DeviceMismatchError                  the ledger exists with other capacity or page size
│   ├── DeviceBusyError                      live clients keep the device from being destroyed
│   ├── DeviceGoneError                      another process destroyed the device
│   ├── LedgerVersionError                   another library version made the ledger
│   ├── LedgerCorruptError                   the file is no ledger, or a damaged one
│   ├── LedgerPermissionError                the OS does not let this user in
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
│   ├── UnknownBlockError                    an id of no allocatable block
│   └── DoubleFreeError                      an id that is not allocated, or named twice
├── HandoverError                            blocks of another process that cannot be fetched
├── WeightError
│   ├── WeightFileError                      a file of weights is missing, short or damaged
│   ├── WeightMismatchError                  the tensors are not the ones that were expected
│   ├── StoreFullError                       all that the weight store holds is in use
│   └── LoadCancelledError                   the caller ended it
├── ClosedError                              the object was closed or freed before
├── ForkedClientError                        the object belongs to the parent process
├── SystemCallError                          the OS or the driver refused; names the call
├── InternalError                            a broken invariant: a bug in kvcached
└── ConflictingPackageError (also ImportError)   another package of the same name is installed

A call that raises has changed nothing, except StrandedPagesError: its pages stay charged and are
given back when the KV cache, tensor or client is closed.
"""

from __future__ import annotations


class KvcachedError(Exception):
    """Base of all exceptions of this package."""


class InvalidArgumentError(KvcachedError, ValueError):
    """A size, count or name that can never work."""


class AlignmentError(InvalidArgumentError):
    """A size or offset that is not a multiple of the page size."""


class UnknownDeviceError(InvalidArgumentError):
    """No such device name, or no ledger to attach to."""


class NoRoomError(KvcachedError):
    """The device has no room for this client now. Expected under load: free memory or wait.

    `need_bytes` were asked for, `free_bytes` could have been had.
    """

    def __init__(self, message: str, need_bytes: int = 0, free_bytes: int = 0) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes

    def __reduce__(self) -> tuple[type[NoRoomError], tuple[str, int, int]]:
        return type(self), (str(self), self.need_bytes, self.free_bytes)


class DeviceError(KvcachedError):
    """The device or its ledger cannot be used."""


class BackendUnavailableError(DeviceError):
    """The machine lacks what the backend needs: for `cuda:N`, NVIDIA's driver or a GPU."""


class DeviceMismatchError(DeviceError):
    """The ledger exists with another capacity or page size."""


class DeviceBusyError(DeviceError):
    """Live clients keep the device from being destroyed."""


class DeviceGoneError(DeviceError):
    """Another process destroyed the device."""


class LedgerVersionError(DeviceError):
    """Another library version made the ledger."""


class LedgerCorruptError(DeviceError):
    """The file is no ledger, or a damaged one."""


class LedgerPermissionError(DeviceError):
    """The OS does not let this user use the ledger or look at a client's memory."""


class SharedMemoryFullError(DeviceError):
    """No space in /dev/shm for the ledger."""


class TooManyClientsError(DeviceError):
    """Every client record of the ledger is taken."""


class UnknownClientError(DeviceError):
    """No live client of that name or process."""


class AmbiguousClientError(DeviceError):
    """Several clients of that name or process; name and pid together tell them apart."""


class MappingError(KvcachedError):
    """A map or unmap that the state of the range does not allow."""


class AlreadyMappedError(MappingError):
    """Something is mapped in the range already."""


class NotMappedError(MappingError):
    """Part of the range is not mapped."""


class UnknownHandleError(MappingError):
    """A page handle that was released or never created."""


class PagesInUseError(MappingError):
    """The engine's streams still have work that may touch the pages; synchronise and try again."""


class StrandedPagesError(MappingError):
    """A batch failed half way and could not be rolled back."""


class BlockError(KvcachedError):
    """A block id that cannot be freed."""


class UnknownBlockError(BlockError):
    """An id of no allocatable block of this KV cache."""


class DoubleFreeError(BlockError):
    """An id that is not allocated, or that one call names twice."""


class HandoverError(KvcachedError):
    """Blocks that another process offered cannot be fetched: the offer is over, its process is
    gone, or its memory cannot be read here. What was to be filled holds anything."""


class WeightError(KvcachedError):
    """Weights that cannot be read, stored or loaded."""


class WeightFileError(WeightError):
    """A file of weights is missing, short, damaged or changing; the message names it."""


class WeightMismatchError(WeightError):
    """Names, types or shapes of tensors are not the ones that were expected."""


class StoreFullError(WeightError):
    """The weight store has no room and all that it holds is in use.

    `need_bytes` were asked for; `missing_bytes` of them are not there.
    """

    def __init__(self, message: str, need_bytes: int = 0, missing_bytes: int = 0) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes
        self.missing_bytes = missing_bytes

    def __reduce__(self) -> tuple[type[StoreFullError], tuple[str, int, int]]:
        return type(self), (str(self), self.need_bytes, self.missing_bytes)


class LoadCancelledError(WeightError):
    """The caller ended a load or a read; nothing of it stays."""


class ClosedError(KvcachedError):
    """The object was closed or freed before."""


class ForkedClientError(KvcachedError):
    """The object belongs to the parent process; open one after the fork."""


class SystemCallError(KvcachedError):
    """The OS or the CUDA driver refused a call; the message names it and the error."""


class InternalError(KvcachedError):
    """A broken invariant: a bug in kvcached."""


class ConflictingPackageError(KvcachedError, ImportError):
    """Another distribution that provides the package `kvcached` is installed."""


_BY_CODE: dict[str, type[KvcachedError]] = {
    "invalid_argument": InvalidArgumentError,
    "not_aligned": AlignmentError,
    "unknown_device": UnknownDeviceError,
    "unavailable": BackendUnavailableError,
    "mismatch": DeviceMismatchError,
    "busy": DeviceBusyError,
    "gone": DeviceGoneError,
    "version": LedgerVersionError,
    "corrupt": LedgerCorruptError,
    "permission": LedgerPermissionError,
    "shm_full": SharedMemoryFullError,
    "too_many_clients": TooManyClientsError,
    "unknown_client": UnknownClientError,
    "ambiguous_client": AmbiguousClientError,
    "already_mapped": AlreadyMappedError,
    "not_mapped": NotMappedError,
    "unknown_handle": UnknownHandleError,
    "in_use": PagesInUseError,
    "stranded": StrandedPagesError,
    "unknown_block": UnknownBlockError,
    "double_free": DoubleFreeError,
    "weight_file": WeightFileError,
    "cancelled": LoadCancelledError,
    "closed": ClosedError,
    "forked": ForkedClientError,
    "system_call": SystemCallError,
    "internal": InternalError,
}


def from_status(code: str, message: str, need_bytes: int, free_bytes: int) -> KvcachedError:
    """The exception for a status of the C++ layers, which call this by name."""
    if code == "no_room":
        return NoRoomError(message, need_bytes, free_bytes)
    return _BY_CODE[code](message)
