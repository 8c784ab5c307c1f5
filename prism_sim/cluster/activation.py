"""Durations of activations and migrations (Prism §5.2, §7.4). Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from prism_sim.core.setup import ActivationSettings, ClusterSetup, DeviceSetup, ModelSetup


def home_node(model: ModelSetup, setup: ClusterSetup) -> str:
    """Returns the node whose host memory has the model's weights if not every node has them."""
    nodes = list(dict.fromkeys(d.node for d in setup.devices))
    return nodes[model.index % len(nodes)]


def activation_s(
    model: ModelSetup,
    ranks: Sequence[DeviceSetup],
    settings: ActivationSettings,
    *,
    restarts: bool,
    weights_node: str,
) -> float:
    """Returns the time of an activation from host memory.

    A parallel load also uses the links of the node's other GPUs, up to the rate of the node's host.
    A restarted engine loads its part over its own link.
    """
    if model.activation_s is not None:
        return model.activation_s
    part_bytes = model.weight_bytes / len(ranks)
    if restarts:
        load_s = part_bytes / settings.plain_load_bytes_s
    else:
        load_s = max(
            part_bytes / settings.load_bytes_s, model.weight_bytes / settings.node_load_bytes_s
        )
    if not settings.weights_everywhere and ranks[0].node != weights_node:
        load_s = max(load_s, model.weight_bytes / settings.network_bytes_s)
    return (settings.restart_s if restarts else settings.layout_s) + load_s


def startup_s(model: ModelSetup, setup: ClusterSetup) -> dict[str, float]:
    """Returns device -> time of the model's activation there, with its peers on the same node."""
    where, settings = home_node(model, setup), setup.activation
    per_node = {
        d.node: activation_s(model, [d] * model.tp, settings, restarts=False, weights_node=where)
        for d in setup.devices
    }
    return {d.name: per_node[d.node] for d in setup.devices}


def handover_s(
    kv_bytes: int,
    source: Sequence[DeviceSetup],
    target: Sequence[DeviceSetup],
    settings: ActivationSettings,
) -> float:
    """Returns the time to move the KV of running requests, `kv_bytes` on each source device.

    It moves over the node's links, one for each rank of the smaller side, or over the network.
    """
    whole_bytes = kv_bytes * len(source)
    if source[0].node == target[0].node:
        return whole_bytes / min(len(source), len(target)) / settings.peer_bytes_s
    return whole_bytes / settings.network_bytes_s


def migration_s(
    model: ModelSetup,
    source: Sequence[DeviceSetup],
    target: Sequence[DeviceSetup],
    settings: ActivationSettings,
    from_host_s: float,
) -> float:
    """Returns the time of a migration.

    Within a node the weights are copied over the links between GPUs. To another node they come from
    its host memory or over the network, whichever is faster.
    """
    if model.activation_s is not None:
        return model.activation_s
    if source[0].node == target[0].node:
        return settings.layout_s + model.weight_bytes / len(target) / settings.peer_bytes_s
    network_s = settings.layout_s + model.weight_bytes / settings.network_bytes_s
    return min(network_s, from_host_s)
