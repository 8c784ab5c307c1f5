"""The machine's weight store, as the configuration names it."""

from __future__ import annotations

from kvcached import WeightStore
from prism.config.schema import AUTO_STORE, ClusterConfig
from prism.engines.peer_weights import PeerWeights


def open_store(config: ClusterConfig) -> WeightStore | None:
    """None if there is none. Every process of the machine that opens it shares it."""
    engine = config.engine
    if not engine.weight_store:
        return None
    return WeightStore.open(
        None if engine.weight_store == AUTO_STORE else engine.weight_store,
        max_bytes=engine.weight_store_bytes,
        namespace=config.namespace,
    )


def open_peers(config: ClusterConfig, store: WeightStore | None) -> PeerWeights | None:
    """The way to other machines' stores, where there are several and this one has a store."""
    return PeerWeights(store, config) if store is not None and config.node else None
