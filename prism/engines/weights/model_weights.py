"""Weights of one model on the device, and their copy in the machine's store.

The copy has the tensors as the engine left them (fused, sharded, repacked), so that a later
activation only copies bytes. It includes the model's fingerprint: the first tokens of the model
when its weights were loaded by the engine's own loader. If loading changed more than the contents
of parameters, it includes a description of the loaded model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

import kvcached
from kvcached import (
    Checkpoint,
    StoredWeights,
    TensorSpec,
    WeightBuilder,
    WeightKey,
    WeightStore,
)
from kvcached.errors import StoreFullError, SystemCallError, WeightFileError
from kvcached.weights.spec import DTYPE_BYTES
from prism.engines.core import EngineContext
from prism.engines.weights.links import LoadLinks
from prism.engines.weights.loaded_state import LoadedState
from prism.engines.weights.peer_weights import PeerWeights
from prism.engines.weights.weight_pages import OWN, WeightPages, specs_of
from prism.engines.weights.weight_store import open_peers, open_store
from prism.messages.model_spec import ModelSpec

FINGERPRINT_TOKENS = 2
_FINGERPRINT = f"{OWN}fingerprint"
_STATE = f"{OWN}state"
# Types of the same size that DLPack's consumers know.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Errors of the environment while a copy is stored; any other error is a bug.
_NO_COPY = (
    StoreFullError,
    WeightFileError,
    SystemCallError,
    OSError,
    MemoryError,
    torch.OutOfMemoryError,
)

log = logging.getLogger("prism.engine")


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """Access of one rank to the machine's weight store. Without store and links, every load reads
    the files. Each of the `ranks` of a tensor-parallel engine stores only its shards."""

    store: WeightStore | None = None
    links: LoadLinks | None = None
    rank: int = 0
    ranks: int = 1
    device: str = "host:0"
    weight_key: Callable[..., WeightKey] | None = None  # function of the adapter
    peers: PeerWeights | None = None

    @classmethod
    def open(
        cls,
        context: EngineContext,
        client: kvcached.Client,
        weight_key: Callable[..., WeightKey],
    ) -> StoreAccess:
        """Opens the store that `engine.weight_store` configures, for loads into the client's
        memory."""
        store, ranks = open_store(context.config), context.ranks
        links = LoadLinks(context, client) if store is not None else None
        peers = open_peers(context.config, store)
        return cls(store, links, ranks.rank, ranks.size, context.device, weight_key, peers)

    def key_of(self, spec: ModelSpec) -> WeightKey | None:
        """Returns the key of the model's copy, None without a store. Reads the whole checkpoint
        once to hash it, unless another machine's store provided the model. Raises
        WeightFileError."""
        weight_key = self.weight_key
        if self.store is None or weight_key is None:
            return None

        def key(content: str) -> WeightKey:
            return weight_key(content, spec, self.rank, self.ranks, self.device)

        if self.peers is not None:
            self.peers.fetch(spec, lambda content: [key(content)])
        return key(self.store.content_of(Checkpoint.open(spec.path)))


class ModelWeights:
    """Weights of one model. `release` is idempotent and returns all memory. Thread rule: the
    engine's thread only."""

    def __init__(self, client: kvcached.Client, access: StoreAccess, spec: ModelSpec) -> None:
        self._client = client
        self._access = access
        self._spec = spec
        self._held: kvcached.StaticLease | None = None
        self.pages = WeightPages(client, spec.name)
        self._key: WeightKey | None = None
        self._stored: StoredWeights | None = None
        self._checkpoint: StoredWeights | None = None
        self.may_store = False
        self._state: LoadedState | None = None  # None: only parameters were loaded
        self._contents: dict[str, torch.Tensor] = {}  # of the state's blocks
        self.link_bytes: dict[str, int] = {}  # loaded from the store over each link

    # --- memory ----------------------------------------------------------------------------

    def reserve(self, size_bytes: int) -> None:
        """Reserves memory for weights of about this size until they are laid out. Raises
        NoRoomError."""
        self._held = self._client.reserve_static(size_bytes, f"weights of {self._spec.name}")

    def lay_out(self, *parts: Mapping[str, torch.Tensor]) -> None:
        """Leases the exact size of these tensors, and assigns addresses in their order. Memory of
        each part can be replaced alone. What is left of the reserved memory stays reserved until
        `release_reserve`. Raises NoRoomError."""
        reserved_bytes = self._held.size_bytes if self._held is not None else 0
        own = {_FINGERPRINT: TensorSpec("int64", (FINGERPRINT_TOKENS,))}
        if self._stored is not None and _STATE in self._stored.specs:
            own[_STATE] = self._stored.specs[_STATE]
        self.release_memory()
        for part in parts:
            if specs := specs_of(part) | own:
                self.pages.add(specs)
            own = {}
        if reserved_bytes > self.size_bytes:
            self.reserve(reserved_bytes - self.size_bytes)

    def back(self) -> None:
        """Maps every page for the engine's loaders, filled as `WeightPages.fill` does. Raises
        NoRoomError."""
        self.pages.fill()
        self.pages[_FINGERPRINT].zero_()  # zero means no answer

    @property
    def size_bytes(self) -> int:
        return self.pages.size_bytes

    def release_reserve(self) -> None:
        """Returns reserved memory that was not laid out."""
        if self._held is not None:
            self._held.release()
            self._held = None

    def release_memory(self) -> None:
        self.release_reserve()
        self.pages.free()

    def release(self) -> None:
        """Returns all memory. REQUIRES: no tensor over the arena is used any more."""
        if self._stored is not None:
            self._stored.close()
            self._stored = None
        self._contents.clear()
        self._close_checkpoint()
        self.release_memory()

    # --- the store -------------------------------------------------------------------------

    def describe(self, state: LoadedState, contents: Mapping[str, torch.Tensor]) -> None:
        """Sets what `save_copy` stores: the state, and the bytes of its blocks, which must be in
        the pages."""
        self._state, self._contents, self.may_store = state, dict(contents), True

    def find_copy(self) -> bool:
        """Returns whether the store has this model in this engine's layout. The copy stays in use
        until `load`.

        A damaged copy is discarded. Raises WeightFileError if the model's own files are damaged.
        """
        self._key = self._access.key_of(self._spec)
        if self._access.store is None or self._key is None:
            return False
        try:
            self._stored = self._access.store.find(self._key)
        except WeightFileError as error:
            self.discard_copy(str(error))
        if self._stored is not None and self._access.links is not None:
            self._access.links.prepare(self._stored.size_bytes)
        return self._stored is not None

    def stored_state(self) -> LoadedState | None:
        """Returns the description of the model in the store, None if it has only parameters.
        Raises WeightFileError."""
        if self._stored is None or _STATE not in self._stored.specs:
            return None
        return LoadedState.from_bytes(bytes(self._stored.buffer(_STATE)))

    def load(self, meanwhile: Callable[[], object]) -> None:
        """Copies every tensor from the store to its place, and calls `meanwhile` during the copy.

        Raises WeightFileError, WeightMismatchError, NoRoomError; the memory is released then.
        """
        links = self._access.links
        if self._stored is None or links is None:
            raise RuntimeError("no copy is open: call find_copy first")
        try:
            [arena] = self.pages.arenas
            self.link_bytes = links.load(arena, self._stored, meanwhile)
        except BaseException:
            self.release()
            raise
        self._stored.close()
        self._stored = None

    def prefetched(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Returns the tensors of the model's files if they were prefetched into the store, None if
        the files must be read. The tensors stay in use until `save_copy`."""
        store, key = self._access.store, self._key
        if store is None or key is None:
            return None
        try:
            self._checkpoint = store.find_checkpoint(key.content)
        except WeightFileError as error:
            log.warning("reading %s from its files: %s", self._spec.name, error)
        return None if self._checkpoint is None else _tensors(self._checkpoint)

    def fingerprint(self) -> tuple[int, ...]:
        """Returns the fingerprint in the stored copy, empty if the weights came from files."""
        tokens = tuple(int(token) for token in self.pages[_FINGERPRINT])
        return tokens if any(tokens) else ()

    def save_copy(self, fingerprint: tuple[int, ...]) -> None:
        """Stores a copy of the loaded weights, unless they came from the store or cannot be stored.

        An error is logged; the model is served without a copy.
        """
        try:
            self._save_copy(fingerprint)
        finally:
            self._contents.clear()

    def _save_copy(self, fingerprint: tuple[int, ...]) -> None:
        files = self._close_checkpoint()
        store, key = self._access.store, self._key
        if store is None or key is None or not self.may_store:
            return
        self.pages[_FINGERPRINT].copy_(torch.tensor(fingerprint))
        try:
            store.get(key, self._put_all).close()
            if files is not None and key.ranks == 1:  # the copy replaces the prefetched files
                store.discard(files)
        except _NO_COPY as error:
            log.warning("cannot store a copy of %s: %s", self._spec.name, error)

    def _put_all(self, builder: WeightBuilder) -> None:
        if self._state is None:
            specs = self.pages.specs
        else:
            specs = specs_of(self._state.memory())
            content = self._state.to_bytes()
            builder.put_bytes(_STATE, TensorSpec("uint8", (len(content),)), [content])
        builder.put(_FINGERPRINT, self.pages[_FINGERPRINT])
        for name, spec in specs.items():
            content = self._contents[name] if self._state else self.pages.bytes_of(name)
            carrier = _CARRIERS[DTYPE_BYTES[spec.dtype]]
            builder.put(name, content.view(carrier).view(spec.shape), dtype=spec.dtype)

    def discard_copy(self, why: str) -> None:
        """Discards a copy that cannot be used. The copy remains if another process uses it, and is
        tried again later."""
        if self._access.store is not None and self._key is not None:
            log.warning("discarding the stored copy of %s: %s", self._spec.name, why)
            self._access.store.discard(self._key)

    def _close_checkpoint(self) -> WeightKey | None:
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is None:
            return None
        checkpoint.close()
        return checkpoint.key


def _tensors(stored: StoredWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors one after another, so that at most one is mapped into this process."""
    for name in sorted(stored.specs):
        spec = stored.specs[name]
        dtype = getattr(torch, spec.dtype)
        if spec.size_bytes == 0:
            yield name, torch.empty(spec.shape, dtype=dtype)
        else:
            yield name, torch.frombuffer(stored.buffer(name), dtype=dtype).view(spec.shape)
