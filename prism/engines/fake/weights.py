"""Weights of the fake engine: a checkpoint's tensors, loaded from the machine's store into an arena
over the same links as a real engine's, and compared byte by byte."""

from __future__ import annotations

import ctypes

import kvcached
from kvcached import StoredWeights, WeightArena
from kvcached.errors import KvcachedError, NoRoomError
from prism.engines.core import EngineContext
from prism.engines.fake.cpu_view import cpu_address
from prism.engines.weights.links import LoadLinks
from prism.engines.weights.weight_store import open_peers, open_store
from prism.errors import ActivationError, ConfigError, EngineError
from prism.messages.model_spec import ModelSpec


class CorruptWeightsError(EngineError):
    """The loaded bytes differ from those in the store."""


class FakeWeights:
    """Weights of one model at a time. Thread rule: the engine's thread."""

    def __init__(self, client: kvcached.Client, context: EngineContext) -> None:
        store = open_store(context.config)
        if store is None:
            raise ConfigError("PRISM_FAKE: load_weights needs engine.weight_store")
        self._store = store
        self._peers = open_peers(context.config, store)
        self._client = client
        self._arena: WeightArena | None = None
        self.links = LoadLinks(context, client)

    def load(self, model: ModelSpec) -> dict[str, int]:
        """Loads a model. Returns the bytes loaded over each link. Raises ActivationError; no memory
        is held then."""
        try:
            if self._peers is not None:
                self._peers.fetch(model, lambda _: [])
            with self._store.get_checkpoint(model.path) as stored:
                self.links.prepare(stored.size_bytes)
                self._arena = self._client.alloc_weights(stored.layout(), model.name)
                link_bytes = self.links.load(self._arena, stored, lambda: None)
                _compare(self._arena, stored)
                return link_bytes
        except NoRoomError as error:
            self.free()
            missing_bytes = max(1, error.need_bytes - error.free_bytes)
            raise ActivationError(f"{model.name}: {error}", missing_bytes) from error
        except KvcachedError as error:
            self.free()
            raise ActivationError(f"{model.name}: {error}") from error

    def free(self) -> None:
        if self._arena is not None:
            self._arena.free()
            self._arena = None

    def close(self) -> None:
        self.free()
        self.links.close()


def _compare(arena: WeightArena, stored: StoredWeights) -> None:
    """Raises CorruptWeightsError if the arena differs from the store. REQUIRES: the CPU can read
    the arena's memory."""
    for name, spec in stored.specs.items():
        if spec.size_bytes == 0:
            continue
        arrived = ctypes.string_at(cpu_address(arena[name]), spec.size_bytes)
        if memoryview(arrived) != memoryview(stored.buffer(name)):
            raise CorruptWeightsError(f"{name} of {arena.what} differs from the store's copy")
