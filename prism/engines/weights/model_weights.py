"""Weights of one model on the device, and their copy in the machine's store.

The copy is in the engine's own layout (fused, sharded), so that a later activation only copies
bytes. It includes the model's fingerprint: the first tokens of the model when its weights were
loaded by the engine's own loader.
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
    WeightArena,
    WeightBuilder,
    WeightKey,
    WeightLayout,
    WeightStore,
)
from kvcached.errors import StoreFullError, SystemCallError, WeightFileError
from prism.engines.core import EngineContext
from prism.engines.weights.links import LoadLinks
from prism.engines.weights.peer_weights import PeerWeights
from prism.engines.weights.weight_store import open_peers, open_store
from prism.messages.model_spec import ModelSpec

FINGERPRINT_TOKENS = 2
_FINGERPRINT = "prism.fingerprint"
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
        self._arena: WeightArena | None = None
        self._key: WeightKey | None = None
        self._stored: StoredWeights | None = None
        self._checkpoint: StoredWeights | None = None
        self.may_store = False
        self.link_bytes: dict[str, int] = {}  # loaded from the store over each link

    # --- memory ----------------------------------------------------------------------------

    def reserve(self, size_bytes: int) -> None:
        """Reserves memory for weights of about this size until they are laid out. Raises
        NoRoomError."""
        self._held = self._client.reserve_static(size_bytes, f"weights of {self._spec.name}")

    def lay_out(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Leases the exact size of these tensors, and assigns addresses in their order. Raises
        NoRoomError."""
        specs = {name: _spec_of(tensor) for name, tensor in parameters.items()}
        specs[_FINGERPRINT] = TensorSpec("int64", (FINGERPRINT_TOKENS,))
        self.release_memory()
        self._arena = self._client.alloc_weights(WeightLayout.of(specs), self._spec.name)

    def back(self) -> None:
        """Maps every page for the engine's loaders. Raises NoRoomError.

        Fills all bytes with a pattern that is not a valid weight, by which `unwritten` finds
        tensors that were not written.
        """
        self._required().fill()
        self[_FINGERPRINT].zero_()  # zero means no answer

    def unwritten(self) -> tuple[str, ...]:
        """Returns the tensors that were not written since `back`. REQUIRES: all writes are done."""
        return self._required().unwritten()

    @property
    def size_bytes(self) -> int:
        return self._arena.size_bytes if self._arena else 0

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.from_dlpack(self._required()[name])

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Returns whether the tensor's memory is its place in the arena."""
        return not tensor.is_meta and tensor.data_ptr() == self[name].data_ptr()

    def checksum(self) -> int:
        """Returns a number that changes when any of the weights does."""
        names = [name for name in self._required() if name != _FINGERPRINT]
        return sum(_sum(self[name]) * (index + 1) for index, name in enumerate(names))

    def release_memory(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None
        if self._arena is not None:
            self._arena.free()
            self._arena = None

    def release(self) -> None:
        """Returns all memory. REQUIRES: no tensor over the arena is used any more."""
        if self._stored is not None:
            self._stored.close()
            self._stored = None
        self._close_checkpoint()
        self.release_memory()

    # --- the store -------------------------------------------------------------------------

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

    def load(self, meanwhile: Callable[[], object]) -> None:
        """Copies every tensor from the store to its place, and calls `meanwhile` during the copy.

        Raises WeightFileError, WeightMismatchError, NoRoomError; the memory is released then.
        """
        links = self._access.links
        if self._stored is None or links is None:
            raise RuntimeError("no copy is open: call find_copy first")
        try:
            self.link_bytes = links.load(self._required(), self._stored, meanwhile)
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
        tokens = tuple(int(token) for token in self[_FINGERPRINT])
        return tokens if any(tokens) else ()

    def save_copy(self, fingerprint: tuple[int, ...]) -> None:
        """Stores a copy of the loaded weights, unless they came from the store or cannot be stored.

        An error is logged; the model is served without a copy.
        """
        files = self._close_checkpoint()
        store, key = self._access.store, self._key
        if store is None or key is None or not self.may_store:
            return
        self[_FINGERPRINT].copy_(torch.tensor(fingerprint))
        try:
            store.get(key, self._put_all).close()
            if files is not None and key.ranks == 1:  # the copy replaces the prefetched files
                store.discard(files)
        except _NO_COPY as error:
            log.warning("cannot store a copy of %s: %s", self._spec.name, error)

    def _put_all(self, builder: WeightBuilder) -> None:
        for name in self._required():
            builder.put(name, self[name])

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

    def _required(self) -> WeightArena:
        if self._arena is None:
            raise RuntimeError("the weights are not laid out")
        return self._arena


def _spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _tensors(stored: StoredWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors one after another, so that at most one is mapped into this process."""
    for name in sorted(stored.specs):
        spec = stored.specs[name]
        dtype = getattr(torch, spec.dtype)
        if spec.size_bytes == 0:
            yield name, torch.empty(spec.shape, dtype=dtype)
        else:
            yield name, torch.frombuffer(stored.buffer(name), dtype=dtype).view(spec.shape)


def _sum(tensor: torch.Tensor) -> int:
    return int(tensor.flatten().view(torch.uint8).view(_widest(tensor)).sum(dtype=torch.int64))


def _widest(tensor: torch.Tensor) -> torch.dtype:
    size_bytes = tensor.numel() * tensor.element_size()
    return torch.int32 if size_bytes % 4 == 0 else torch.uint8
