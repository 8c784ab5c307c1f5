"""Access to the machine's weight store and to those of other machines."""

from __future__ import annotations

from kvcached import WeightStore
from prism.config.schema.cluster_config import AUTO_STORE, ClusterConfig
from prism.engines.weights.peer_weights import PeerWeights


def open_store(config: ClusterConfig) -> WeightStore | None:
    """Opens the configured weight store, which all processes of the machine share. Returns None if
    none is configured."""
    engine = config.engine
    if not engine.weight_store:
        return None
    return WeightStore.open(
        None if engine.weight_store == AUTO_STORE else engine.weight_store,
        max_bytes=engine.weight_store_bytes,
        namespace=config.namespace,
    )


def open_peers(config: ClusterConfig, store: WeightStore | None) -> PeerWeights | None:
    """Returns access to other machines' stores; None with one machine, or without a store here."""
    return PeerWeights(store, config) if store is not None and config.node else None
