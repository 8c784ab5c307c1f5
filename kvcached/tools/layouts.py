"""Output of `kvctl layout`: each arrangement of a model's KV cache, and the one to take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from kvcached.errors import InvalidArgumentError
from kvcached.layouts import (
    ARRANGEMENTS,
    HybridLayout,
    LayerGroup,
    LayoutChoice,
    choose_layout,
)
from kvcached.models import layout_of_config
from kvcached.tools.sizes import format_size
from kvcached.tools.tables import new_table

COLUMNS = (
    *("", "GROUP", "LAYERS", "ARRANGEMENT", "KV/TOKEN"),
    *("GAP", "QUANTUM", "TOKENS", "QUANTA/DEVICE", "ONE REQUEST"),
)


@dataclass(frozen=True)
class Place:
    """Device for the model, and the number of models that share it."""

    page_bytes: int
    device_bytes: int
    models: int
    context_tokens: int


@dataclass(frozen=True)
class Row:
    """One arrangement of one group of layers. `request_bytes` is for one full-context request."""

    group: str
    choice: LayoutChoice
    taken: bool
    request_bytes: int


def read_groups(
    path: Path, dtype: str | None, block_tokens: int, ranks: int = 1
) -> tuple[LayerGroup, ...]:
    """Returns the groups of layers of a config.json (or its directory), on each of `ranks`
    tensor-parallel ranks."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"cannot read {file}: {error}; pass a config.json") from error
    if not isinstance(config, dict):
        raise InvalidArgumentError(f"{file} is not a JSON object; pass a config.json")
    layout = layout_of_config(config, dtype, block_tokens, ranks)
    if isinstance(layout, HybridLayout):
        return layout.groups
    return (LayerGroup("all layers", tuple(range(layout.layer_count)), layout),)


def rows_of(groups: Sequence[LayerGroup], place: Place) -> list[Row]:
    """Returns every arrangement of every group. `taken` marks the choice of choose_layout."""
    rows = []
    for group in groups:
        sizes: dict[str, Any] = {
            "page_bytes": place.page_bytes,
            "device_bytes": place.device_bytes,
            "models": place.models,
        }
        best = choose_layout(group.layout, **sizes)
        tokens = group.live_tokens_max(place.context_tokens)
        for arrangement in ARRANGEMENTS:
            choice = choose_layout(group.layout, **sizes, accepted=[arrangement])
            request_bytes = choice.layout.need_bytes(tokens, place.page_bytes)
            rows.append(Row(group.name, choice, choice.layout == best.layout, request_bytes))
    return rows


def row_record(row: Row, page_bytes: int) -> dict[str, Any]:
    """Returns a row for --json."""
    layout = row.choice.layout
    return {
        "group": row.group,
        "layers": layout.layer_count,
        "arrangement": layout.arrangement,
        "padded_token_bytes": layout.padded_token_bytes,
        "token_bytes": layout.token_bytes,
        "quantum_bytes": row.choice.quantum_bytes,
        "quantum_tokens": layout.slab_tokens(page_bytes),
        "quanta_share": row.choice.quanta_share,
        "request_bytes": row.request_bytes,
        "taken": row.taken,
    }


def layout_table(rows: Sequence[Row], place: Place) -> RenderableType:
    """Returns a table with a line per arrangement, an arrow at the one to take, and the reasons."""
    table = new_table(COLUMNS, ("", "GROUP", "ARRANGEMENT"))
    for row in rows:
        table.add_row(*(Text(cell) for cell in _cells(row, place.page_bytes)))
    return Group(table, *(Text(f"{r.group}: {r.choice.reason}") for r in rows if r.taken))


def _cells(row: Row, page_bytes: int) -> tuple[str, ...]:
    layout = row.choice.layout
    return (
        "->" if row.taken else "",
        row.group,
        str(layout.layer_count),
        layout.arrangement,
        format_size(layout.token_bytes),
        f"{row.choice.padding_share:.1%}" if layout.padded_token_bytes else "-",
        format_size(row.choice.quantum_bytes),
        str(layout.slab_tokens(page_bytes)),
        f"{row.choice.quanta_share:.1%}",
        format_size(row.request_bytes),
    )
