"""First come, first served: the default admission order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prism.policies.data import AdmissionOrder, EngineView, Waiting


def order(
    requests: Sequence[Waiting],
    engines: Mapping[str, EngineView],
    now_s: float,
    busy_s: float = 0.0,
) -> AdmissionOrder:
    """Returns all requests, oldest first. Deadlines are ignored, so no request is late."""
    return AdmissionOrder(tuple(sorted(requests, key=lambda r: (r.arrival_s, r.id))), ())
