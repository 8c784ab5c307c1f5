"""Device memory for one model's weights, and loads into it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import kvcached._core as _core
from kvcached.checks import checked, each, instance_of, not_negative, positive, text, threads
from kvcached.errors import ClosedError, InvalidArgumentError
from kvcached.weights.entry import StoredWeights
from kvcached.weights.links import WeightLinks
from kvcached.weights.spec import TensorSpec, WeightLayout, check_specs
from kvcached.weights.tensor_reader import TensorReader

_WAIT_MS = 50
_BYTE_MAX = 0xFF
_GLANCE_BYTES = 4096  # usually enough to find a byte that differs


def _byte(name: str, value: int) -> int:
    if not_negative(name, value) > _BYTE_MAX:
        raise InvalidArgumentError(f"{name} is {value}; it must be from 0 to {_BYTE_MAX}")
    return value


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of a weight load."""

    threads: int = 4
    """Copying threads, for loads without `WeightLinks`."""
    chunk_bytes: int = 8 << 20
    bytes_per_s: int | None = None
    """Limit of the rate, which leaves bandwidth to other processes."""

    def __post_init__(self) -> None:
        threads("threads", self.threads)
        positive("chunk_bytes", self.chunk_bytes)
        if self.bytes_per_s is not None:
            positive("bytes_per_s", self.bytes_per_s)


class WeightLoad:
    """A load that runs in its own threads. Thread rule: any thread."""

    def __init__(self, arena: WeightArena, core: _core.WeightLoad) -> None:
        self._arena = arena
        self._core = core

    @property
    def total_bytes(self) -> int:
        """Bytes to copy."""
        return self._core.total_bytes

    @property
    def started_bytes(self) -> int:
        """Bytes whose copy has begun or is done."""
        return self._core.started_bytes

    def cancel(self) -> None:
        """Stops after the chunks under way; `result` frees the arena and raises."""
        self._core.cancel()

    def done(self) -> bool:
        """Returns whether the threads have ended, with or without success."""
        return self._core.wait(0)

    @property
    def link_bytes(self) -> dict[str, int]:
        """Bytes that each link from the host carried, by name. Complete once the load is done.

        "cuda:1" is a GPU's link; "host" stands for a host device's memory.
        """
        return self._core.carried()

    @property
    def lost_links(self) -> dict[str, str]:
        """Reasons why other GPUs' links failed, by name. Complete once the load is done.

        The remaining links carried their bytes.
        """
        return self._core.lost()

    def result(self) -> None:
        """Waits until every byte is loaded.

        On failure frees the arena, so that nothing stays leased, and raises: WeightFileError if a
        file of the store is missing or short, NoRoomError if memory outside of the ledger fills the
        device, LoadCancelledError. A failed link of another GPU is not an error (`lost_links`).
        """
        try:
            while not self._core.wait(_WAIT_MS):  # in slices, so that Ctrl-C is handled
                pass
            self._core.check()
        except BaseException:
            self._arena.free()
            raise


class WeightArena:
    """Memory for tensors at fixed offsets, made by `Client.alloc_weights`.

    All of it is leased, as static memory, before its first page exists. Thread rule: one thread;
    loads run in parallel to it.
    """

    def __init__(self, client: _core.Client, layout: WeightLayout, what: str) -> None:
        self.layout = layout
        self.what = what
        self._client = client
        core = _core.WeightArena.create(client, layout.size_bytes)
        self.size_bytes = core.size_bytes  # leased: the layout's, rounded up to pages
        self._core: _core.WeightArena | None = core
        self._load: _core.WeightLoad | None = None
        self._reader = TensorReader()

    def __repr__(self) -> str:
        state = f"{self.backed_bytes} backed" if self._core else "freed"
        return f"WeightArena({self.what!r}, {self.size_bytes} bytes, {state})"

    @property
    def backed_bytes(self) -> int:
        """Bytes whose pages exist."""
        return 0 if self._core is None else self._core.backed_bytes

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.specs)

    def __getitem__(self, name: str) -> _core.TensorView:
        """Returns a tensor for `torch.from_dlpack`. Read it after the load and before `free`."""
        return self.view(name, self._spec(name).dtype)

    @checked(name=text, dtype=text, shape=each(not_negative))
    def view(self, name: str, dtype: str, shape: tuple[int, ...] | None = None) -> _core.TensorView:
        """Returns a tensor's bytes as another type, for types that DLPack consumers lack."""
        extents = self._spec(name).shape if shape is None else shape
        return self._open_core().view(self.layout.offsets_bytes[name], list(extents), dtype)

    def address_range(self) -> tuple[int, int]:
        """Returns the first address, and that after the last tensor."""
        start = self._open_core().address
        return start, start + self.layout.size_bytes

    def back(self) -> None:
        """Creates every page, for an engine that writes the tensors itself. Raises NoRoomError."""
        self._open_core().back(self.layout.size_bytes)

    @checked(byte=_byte)
    def fill(self, byte: int = 0xFF) -> None:
        """Creates every page and sets every byte, with padding. Raises NoRoomError.

        A GPU's fresh pages have undefined contents, so only a fill distinguishes tensors that were
        written later from those that were not. 0xFF in every byte is never a weight: it is NaN in
        all floating-point types that have one.
        """
        self._open_core().fill(byte)

    @checked(byte=_byte)
    def unwritten(self, byte: int = 0xFF) -> tuple[str, ...]:
        """Returns the tensors whose bytes all still have the value that `fill` set.

        Copied from the device piece by piece, up to the first byte that differs. Synchronise the
        streams that wrote them first.
        """
        return tuple(name for name in self if self._is_filled(name, byte))

    def _is_filled(self, name: str, byte: int) -> bool:
        with self._reader.open(self._bytes_of(name), name, _GLANCE_BYTES) as content:
            return self.layout.specs[name].size_bytes > 0 and all(
                bytes(piece).count(byte) == len(piece) for piece in content.pieces
            )

    def read(self, name: str) -> bytes:
        """Returns a copy of a tensor's content, for checks: the CPU cannot read a GPU's pages."""
        with self._reader.open(self._bytes_of(name), name) as content:
            return b"".join(bytes(piece) for piece in content.pieces)

    def _bytes_of(self, name: str) -> _core.TensorView:
        return self.view(name, "uint8", (self._spec(name).size_bytes,))

    def _spec(self, name: str) -> TensorSpec:
        if text("name", name) not in self.layout.specs:
            raise InvalidArgumentError(f"tensor {name!r} is not in this arena")
        return self.layout.specs[name]

    def load(
        self,
        weights: StoredWeights,
        options: LoadOptions | None = None,
        links: WeightLinks | None = None,
    ) -> None:
        """Copies every tensor while the pages are being created. Raises as `WeightLoad.result`
        does.
        """
        self.start_load(weights, options, links).result()

    @checked(
        weights=instance_of(StoredWeights),
        options=instance_of(LoadOptions),
        links=instance_of(WeightLinks),
    )
    def start_load(
        self,
        weights: StoredWeights,
        options: LoadOptions | None = None,
        links: WeightLinks | None = None,
    ) -> WeightLoad:
        """Starts a load. `weights` must stay open until it is done.

        Without `links` the load opens its own, which on a GPU pins memory each time. Raises
        WeightMismatchError, before anything is copied, unless the weights have the layout's
        tensors, and DeviceBusyError while another load uses the links.
        """
        core = self._open_core()
        if self._load is not None and not self._load.wait(0):
            raise InvalidArgumentError("a load into this arena is under way")
        options = options or LoadOptions()
        check_specs(f"the weights for {self.what}", weights.specs, self.layout.specs)
        pieces = [
            (str(weights.path(name)), 0, spec.size_bytes, self.layout.offsets_bytes[name])
            for name, spec in self.layout.specs.items()
        ]
        self._load = _core.WeightLoad.start(
            core,
            pieces,
            (links or WeightLinks(self._client, threads=options.threads)).core,
            options.chunk_bytes,
            options.bytes_per_s or 0,
        )
        return WeightLoad(self, self._load)

    def free(self) -> None:
        """Returns every page and the lease, and ends a running load. A second call does nothing.

        Views keep their addresses reserved; accessing them is a fault.
        """
        if self._core is None:
            return
        if self._load is not None:
            self._load.cancel()
            while not self._load.wait(_WAIT_MS):
                pass
        self._core.close()
        self._reader.close()
        self._core = self._load = None

    def _open_core(self) -> _core.WeightArena:
        if self._core is None:
            raise ClosedError("the arena was freed; allocate another one")
        return self._core

    def __enter__(self) -> WeightArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()


@dataclass(frozen=True, slots=True)
class AddressUsage:
    """A client's address space. An object that does not fit gets its own reservation."""

    size_bytes: int
    free_bytes: int
    largest_free_bytes: int
