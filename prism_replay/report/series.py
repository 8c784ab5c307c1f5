"""Series of a replay's plots, one for each model, and their colours."""

from __future__ import annotations

from collections.abc import Mapping

from prism_replay.report import theme
from prism_replay.results import ReplayResults

OTHERS = "other models"


def series_of(results: ReplayResults) -> dict[str, str]:
    """Returns model -> name of its series.

    With more models than colours, the last ones share the series OTHERS. The trace's models come
    first, ordered by requests, then models that only the server has.
    """
    extra = {name for sample in results.samples for name in sample.kv_bytes}
    devices = (memory for sample in results.samples for memory in sample.devices.values())
    extra |= {name for memory in devices for name in memory.weights_bytes}
    models = [*results.summary.models, *sorted(extra - set(results.summary.models))]
    own = theme.SERIES_MAX if len(models) <= theme.SERIES_MAX else theme.SERIES_MAX - 1
    return {name: name if rank < own else OTHERS for rank, name in enumerate(models)}


def colors_of(series: Mapping[str, str]) -> dict[str, str]:
    """Returns name of a series -> its colour.

    Args:
        series: Result of `series_of`.
    """
    names = dict.fromkeys(series.values())
    return {name: theme.series_color(number) for number, name in enumerate(names)}
