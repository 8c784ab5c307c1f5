"""Tables and bars of `kvctl` for terminals."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvcached.balloon import ShrinkAnswer
from kvcached.monitoring.segments import Segment
from kvcached.monitoring.snapshot import DeviceSnapshot
from kvcached.tools.rates import Rates
from kvcached.tools.sizes import format_size

BAR_CELLS = 40
CLIENT_COLUMNS = ("used", "reserved", "can give", "limit", "min", "static", "resident", "maps/s")


def new_table(columns: Iterable[str], left: Collection[str]) -> Table:
    """Returns a table without a frame. Numbers are right-aligned."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return table


def segment_table(segments: Sequence[Segment]) -> RenderableType:
    """Returns a table with a line for each segment."""
    if not segments:
        return Text("no segments")
    columns = ("NAMESPACE", "DEVICE", "VERSION", "CAPACITY", "ALIVE", "DEAD", "STATE")
    table = new_table(columns, ("NAMESPACE", "DEVICE", "STATE"))
    for s in segments:
        version = "-" if s.version is None else str(s.version)
        alive, dead = str(s.clients_alive), str(s.clients_dead)
        capacity = _size(s.capacity_bytes)
        cells = (s.namespace, s.device, version, capacity, alive, dead, _state(s))
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _state(segment: Segment) -> str:
    if segment.problem:
        return f"unreadable: {segment.problem}"
    return f"stale: {segment.stale_reason}" if segment.stale_reason else "in use"


def device_view(snapshots: Sequence[DeviceSnapshot], rates: Rates) -> RenderableType:
    """Returns a bar for each device, with a line for each of its clients."""
    if not snapshots:
        return Text("no devices in use")
    parts: list[RenderableType] = []
    for snapshot in snapshots:
        parts += [_bar(snapshot), _client_table(snapshot, rates), Text("")]
    return Group(*parts)


def _bar(snapshot: DeviceSnapshot) -> Text:
    """Returns a bar of static memory, existing pages, and further reserved pages and minimums."""
    usage = snapshot.usage
    promised_bytes = max(0, usage.reserved_bytes - usage.static_bytes - usage.committed_bytes)
    bar = Text(f"{snapshot.namespace}/{snapshot.device} [")
    cells_left = BAR_CELLS
    shares = ((usage.static_bytes, "blue", "#"), (usage.committed_bytes, "green", "|"))
    for share_bytes, colour, mark in (*shares, (promised_bytes, "yellow", ":")):
        cells = min(cells_left, round(BAR_CELLS * share_bytes / usage.capacity_bytes))
        bar.append(mark * cells, style=colour)
        cells_left -= cells
    percent = 100 * usage.reserved_bytes / usage.capacity_bytes
    bar.append(" " * cells_left + "] ")
    bar.append(f"{format_size(usage.reserved_bytes)} of {format_size(usage.capacity_bytes)}")
    bar.append(f" ({percent:.0f}%), {format_size(usage.free_bytes)} free")
    return bar


def _client_table(snapshot: DeviceSnapshot, rates: Rates) -> Table:
    table = new_table(("PID", "CLIENT", *map(str.upper, CLIENT_COLUMNS)), ("CLIENT",))
    for client, resident_bytes in snapshot.clients:
        rate = rates.maps_per_s(snapshot, client)
        table.add_row(
            str(client.pid),
            Text(client.name),
            _size(client.committed_bytes),
            _size(client.reserved_bytes),
            _size(client.spare_bytes + client.evictable_bytes),
            _size(client.limit_bytes),
            _size(client.min_bytes),
            _size(client.static_bytes),
            _size(resident_bytes),
            "-" if rate is None else f"{rate:.0f}",
        )
    return table


def answer_table(answers: Sequence[ShrinkAnswer]) -> RenderableType:
    """Returns a table of what each client gave."""
    if not answers:
        return Text("no clients")
    columns = ("PID", "CLIENT", "GAVE", "EVICTED TOKENS", "OUTCOME")
    table = new_table(columns, ("CLIENT", "OUTCOME"))
    for answer in answers:
        gave = (_size(answer.returned_bytes), str(answer.evicted_tokens), answer.outcome)
        table.add_row(str(answer.pid), Text(answer.name), *gave)
    return table


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_size(size_bytes)
