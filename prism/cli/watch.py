"""`prism-serve top` and `logs`: a running cluster, live."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.units import format_size
from prism.errors import ConfigError
from prism.messages.agent import AgentReport
from prism.messages.cluster import ClusterStatus, OperatorCommand
from prism.serve import operator
from prism.serve.console import status_tables

_BAR_MIN, _BAR_MAX = 8, 40
# Columns of a terminal that the rest of a bar's row takes, without the device's name.
_BESIDE_BAR = 50
_ASK_S = 10.0
# Parts of a device's memory: their colours, and their marks without colours.
_PARTS = {
    "weights": ("cyan", "#"),
    "KV": ("green", "|"),
    "other": ("yellow", ":"),
    "free": ("bright_black", "."),
}


def show(
    config: ClusterConfig, console: Console, every_s: float, *, once: bool, as_json: bool
) -> None:
    """Draws the cluster until Ctrl-C, or once. In a pipe, and as JSON, one picture follows another.
    Raises OperatorError."""
    colours = console.color_system is not None and not console.no_color

    def draw() -> RenderableType:
        return picture(_status(config), console.width, colours=colours)

    if as_json:
        _repeat(lambda: print(_answer(config), flush=True), every_s, once)
    elif once or not console.is_terminal:
        _repeat(lambda: console.print(draw()), every_s, once)
    else:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            _repeat(lambda: live.update(draw(), refresh=True), every_s, once)


def _repeat(draw: Callable[[], None], every_s: float, once: bool) -> None:
    draw()
    while not once:
        time.sleep(every_s)
        draw()


def _answer(config: ClusterConfig) -> str:
    """Returns the status as JSON."""
    return operator.ask(config, OperatorCommand("status"), _ASK_S).message


def _status(config: ClusterConfig) -> ClusterStatus:
    return msgspec.json.decode(_answer(config), type=ClusterStatus)


def picture(status: ClusterStatus, width: int, *, colours: bool = True) -> RenderableType:
    """Returns bars of each device's memory, then models and waiting requests. Without colours each
    part of a bar has its own mark."""
    if not status.agents:
        return status_tables.cluster(status)
    legend = Text("  ").join(
        Text(f"{'■' if colours else mark} {name}", style=style)
        for name, (style, mark) in _PARTS.items()
    )
    names = [status_tables.device_name(status, agent.device) for agent in status.agents]
    cells = max(_BAR_MIN, min(_BAR_MAX, width - _BESIDE_BAR - max(map(len, names), default=0)))
    table = Table(
        "device", "memory", "used", "waiting", "running", "KVPR", box=None, pad_edge=False
    )
    for name, agent in zip(names, status.agents, strict=True):
        table.add_row(
            name,
            _bar(agent, cells, colours=colours),
            f"{format_size(agent.reserved_bytes)} of {format_size(agent.capacity_bytes)}",
            str(sum(model.waiting for model in agent.models)),
            str(sum(model.running for model in agent.models)),
            f"{status.kvpr.get(agent.device, 0):.3g}",
        )
    return Group(status_tables.Fitted(table), legend, status_tables.cluster(status))


def _bar(agent: AgentReport, cells: int, *, colours: bool) -> Text:
    bar, left = Text(), cells
    for name, size_bytes in shares(agent).items():
        style, mark = _PARTS[name]
        part = round(cells * size_bytes / max(1, agent.capacity_bytes))
        part = left if name == "free" else min(left, part)
        bar.append(("█" if colours else mark) * part, style=style)
        left -= part
    return bar


def shares(agent: AgentReport) -> dict[str, int]:
    """Returns the bytes of each part of a device's memory. Their sum is its capacity."""
    weights = sum(model.static_bytes for model in agent.models)
    kv = sum(model.kv_mapped_bytes for model in agent.models)
    other = max(0, agent.reserved_bytes - weights - kv)
    free = max(0, agent.capacity_bytes - max(agent.reserved_bytes, weights + kv))
    return {"weights": weights, "KV": kv, "other": other, "free": free}


def logs(config: ClusterConfig, parts: list[str], lines: int, *, follow: bool) -> int:
    """Prints the ends of these parts' logs, or of all. Returns the exit code of tail(1). Raises
    ConfigError that lists the parts."""
    folder = Path(config.run_dir) / "logs"
    found = {path.stem: path for path in sorted(folder.glob("*.log"))}
    for part in parts:
        if part not in found:
            raise ConfigError(f"PART: unknown log {part!r}; logs: {', '.join(found)}")
    wanted = [str(found[part]) for part in parts or found]
    options = ["-n", str(lines), *(["-F"] if follow else [])]
    return subprocess.run(["tail", *options, *wanted], check=False).returncode
