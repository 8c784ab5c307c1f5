"""Links from host memory into a device: pinned buffers and streams, or threads alone."""

from __future__ import annotations

from typing import Protocol

import kvcached._core as _core
from kvcached.checks import checked, not_negative, positive, threads
from kvcached.errors import ClosedError, InvalidArgumentError

_CoreClient = _core.Client
STAGING_BYTES = 32 << 20  # per link, as in Prism §5.2


class ClientLike(Protocol):
    """A `kvcached.Client`, whose module imports this one."""

    _core: _CoreClient


def _core_of(client: ClientLike) -> _core.Client:
    core = getattr(client, "_core", None)
    if not isinstance(core, _core.Client):
        raise InvalidArgumentError(f"other must be a Client, not {type(client).__name__}")
    return core


class WeightLinks:
    """Links made by `Client.open_weight_links`, reused across loads so that memory is pinned once.

    One load at a time uses them. Thread rule: any thread.
    """

    @checked(threads=threads, staging_bytes=positive)
    def __init__(
        self, client: _core.Client, *, threads: int = 4, staging_bytes: int = STAGING_BYTES
    ) -> None:
        opened = _core.WeightLinks.open(client, threads, staging_bytes)
        self._core: _core.WeightLinks | None = opened

    @property
    def core(self) -> _core.WeightLinks:
        """The extension's object, for kvcached itself."""
        if self._core is None:
            raise ClosedError("the links are closed; open new ones")
        return self._core

    @checked(share_bytes=not_negative)
    def add(self, other: ClientLike, *, share_bytes: int = 0) -> None:
        """Adds the link between `other`'s GPU and the host to later loads (Prism §5.2).

        `other` is a `Client`. Its bytes continue to this GPU over the link between the two GPUs.
        Leases staging memory there as pages, and `share_bytes` for this process's other memory on
        that GPU (a CUDA context), which `other`'s usage shows. `drop` gives both back between
        loads; `other` cannot close before. Raises NoRoomError, BackendUnavailableError for GPUs
        that are not connected, DeviceBusyError while a load runs, InvalidArgumentError for a host
        device or a GPU that was added before.
        """
        self.core.add(_core_of(other), share_bytes)

    def drop(self, other: ClientLike) -> None:
        """Undoes `add`. Does nothing if `other` was not added.

        Raises DeviceBusyError while a load runs.
        """
        self.core.drop(_core_of(other))

    def close(self) -> None:
        """Returns buffers and leases, once the load that uses them is done."""
        if self._core is not None:
            self._core.close()
        self._core = None
