"""Parts of a simulation that its components share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prism.policies.policy import Policy
from prism_sim.cluster.copies import SimModel
from prism_sim.cluster.device import SimDevice
from prism_sim.core.kernel import Kernel
from prism_sim.core.records import Records
from prism_sim.core.setup import ClusterSetup


@dataclass(frozen=True, slots=True)
class ClusterParts:
    """Simulated cluster: its clock, input, state and output."""

    kernel: Kernel
    setup: ClusterSetup
    policy: Policy
    # In the order of `setup`.
    models: Sequence[SimModel]
    devices: Sequence[SimDevice]
    records: Records
