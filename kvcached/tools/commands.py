"""Commands of `kvctl`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

import kvcached
from kvcached import Device, collect_garbage, segments
from kvcached.errors import InvalidArgumentError, UnknownDeviceError
from kvcached.monitoring.snapshot import DeviceSnapshot, UnreadDevice, read_devices, used_segments
from kvcached.tools.layouts import Place, layout_table, read_groups, row_record, rows_of
from kvcached.tools.rates import Rates
from kvcached.tools.records import Record, device_record, segment_record
from kvcached.tools.sizes import format_size, parse_size
from kvcached.tools.tables import answer_table, device_view, segment_table

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="only this namespace; all unless given")
]
DeviceName = Annotated[
    str | None, typer.Option("--device", "-d", help="only this device, such as host:0 or cuda:0")
]
Json = Annotated[bool, typer.Option("--json", help="for scripts: JSON, sizes in bytes")]
ClientName = Annotated[str, typer.Argument(help="name of the client, or its process id")]
Pid = Annotated[int | None, typer.Option("--pid", help="tells clients of one name apart")]
Number = Annotated[
    int | None, typer.Option("--number", help="tells clients of one process apart; see top --json")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvctl {kvcached.__version__}")
        raise typer.Exit


@app.callback()
def main_command(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Shows what each client holds of each device, and changes it."""


_UNBOUNDED_CELLS = 10_000


def _print(as_json: bool, value: object, view: Callable[[], RenderableType]) -> None:
    if as_json:
        typer.echo(json.dumps(value))
        return
    console = Console()
    if not console.is_terminal:  # lines in a file or a pipe are never cut off
        console.width = _UNBOUNDED_CELLS
    console.print(view())


@app.command("list")
def list_command(namespace: Namespace = None, as_json: Json = False) -> None:
    """Lists every segment in shared memory: its clients, or why it is stale.

    Examples: kvctl list · kvctl list --namespace demo · kvctl list --json
    """
    found = segments(namespace)
    _print(as_json, [segment_record(s) for s in found], lambda: segment_table(found))


@app.command()
def gc(
    namespace: Namespace = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="remove nothing")] = False,
    as_json: Json = False,
) -> None:
    """Removes the segments that no process has open.

    Examples: kvctl gc --dry-run · kvctl gc · kvctl gc --namespace demo --json
    """
    found = collect_garbage(dry_run, namespace)
    done = "would remove" if dry_run else "removed"
    lines = [f"{done} {s.namespace}/{s.device}: {s.stale_reason}" for s in found]
    text = "\n".join(lines or ["nothing is stale"])
    _print(as_json, [segment_record(s) for s in found], lambda: Text(text))


@app.command()
def top(
    namespace: Namespace = None,
    device: DeviceName = None,
    interval_s: Annotated[float, typer.Option("--interval", min=0.05, help="seconds")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="two reads, one print")] = False,
    as_json: Json = False,
) -> None:
    """Shows every device in use and its clients, refreshed until Ctrl-C.

    In a bar, # is static memory, | is existing pages, : is further reserved pages and minimums.
    --json prints one line for each read. A device whose ledger another process keeps locked is
    reported on stderr; with --once the exit code is then 2.

    Examples: kvctl top · kvctl top --device cuda:0 --interval 0.5 · kvctl top --once --json
    """
    frames = _frames(namespace, device, interval_s, once)
    try:
        if as_json or once or not Console().is_terminal:
            for snapshots, unread, rates in frames:
                if snapshots or not unread:
                    _print(
                        as_json,
                        [device_record(s, rates) for s in snapshots],
                        lambda s=snapshots, r=rates: device_view(s, r),  # type: ignore[misc]
                    )
                for each in unread:
                    typer.echo(f"kvctl: {_problem(each)}", err=True)
                if unread and once:
                    raise typer.Exit(2)
        else:
            _live(frames)
    except KeyboardInterrupt:
        return


@app.command()
def layout(
    config: Annotated[Path, typer.Argument(help="a model's config.json, or its directory")],
    *,
    device_size: Annotated[str, typer.Option("--device-size", help="memory of the device")],
    models: Annotated[int, typer.Option(help="models that share the device", min=1)] = 1,
    page: Annotated[str, typer.Option(help="bytes of a page")] = "2MiB",
    dtype: Annotated[str | None, typer.Option(help="of the KV cache; the model's own")] = None,
    block_tokens: Annotated[int, typer.Option(help="tokens of a block")] = 16,
    context: Annotated[int, typer.Option(help="tokens of one request", min=1)] = 4096,
    tp: Annotated[int, typer.Option(help="devices of the model; shows one of them", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """Shows the possible layouts of a model's KV cache, their costs, and the one to take.

    QUANTUM is the smallest growth; QUANTA/DEVICE counts one for each model. Groups of layers (full
    attention, sliding window) are judged separately. No device is needed.

    Examples: kvctl layout models/llama --device-size 80GiB --models 8
    """
    place = Place(parse_size(page), parse_size(device_size), models, context)
    rows = rows_of(read_groups(config, dtype, block_tokens, tp), place)
    records = [row_record(row, place.page_bytes) for row in rows]
    _print(as_json, records, lambda: layout_table(rows, place))


Frame = tuple[list[DeviceSnapshot], list[UnreadDevice], Rates]


def _frames(
    namespace: str | None, device: str | None, interval_s: float, once: bool
) -> Iterator[Frame]:
    """Yields reads forever, or with `once` the second read alone: a rate needs two."""
    rates = Rates()
    first = True
    while True:
        read = read_devices(namespace, device)
        snapshots = [each for each in read if isinstance(each, DeviceSnapshot)]
        unread = [each for each in read if isinstance(each, UnreadDevice)]
        rates.update(time.monotonic(), snapshots)
        if unread or not (once and first):
            yield snapshots, unread, rates
            if once:
                return
        first = False
        time.sleep(interval_s)


def _live(frames: Iterator[Frame]) -> None:
    with Live(screen=True, auto_refresh=False) as live:
        for snapshots, unread, rates in frames:
            problems = [Text(_problem(each), style="red") for each in unread]
            seen = [device_view(snapshots, rates)] if snapshots or not unread else []
            live.update(Group(*seen, *problems), refresh=True)


def _problem(unread: UnreadDevice) -> str:
    return f"{unread.namespace}/{unread.device}: {unread.error}"


@app.command()
def limit(
    client: ClientName,
    size: Annotated[str, typer.Argument(help="such as 512MiB or 2GiB, or none")],
    *,
    namespace: Namespace = None,
    device: DeviceName = None,
    pid: Pid = None,
    number: Number = None,
    as_json: Json = False,
) -> None:
    """Limits a client's pages, or lifts the limit. Applies from the client's next reservation.

    A limit below what the client holds stops growth, and the client is asked to shrink to it.

    Examples: kvctl limit engine-0 512MiB · kvctl limit engine-0 none · kvctl limit 4711 2GiB
    """
    limit_bytes = None if size.lower() == "none" else parse_size(size)
    opened = _find_device(namespace, device)
    opened.set_limit(_name_or_pid(client), limit_bytes, pid=pid, number=number)
    shown = "none" if limit_bytes is None else format_size(limit_bytes)
    _report(opened, client, {"limit_bytes": limit_bytes}, f"limit {shown}", as_json)


@app.command("min")
def min_command(
    client: ClientName,
    size: Annotated[str, typer.Argument(help="such as 512MiB or 2GiB")],
    *,
    namespace: Namespace = None,
    device: DeviceName = None,
    pid: Pid = None,
    number: Number = None,
    as_json: Json = False,
) -> None:
    """Guarantees a client's pages: no other client can take them.

    Examples: kvctl min engine-0 64MiB · kvctl min engine-0 0 --device cuda:0 --namespace demo
    """
    min_bytes = parse_size(size)
    opened = _find_device(namespace, device)
    opened.set_min(_name_or_pid(client), min_bytes, pid=pid, number=number)
    _report(opened, client, {"min_bytes": min_bytes}, f"min {format_size(min_bytes)}", as_json)


@app.command()
def trim(
    client: Annotated[
        str | None, typer.Argument(help="name of the client, or its process id; all unless given")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option("--bytes", help="such as 512MiB; all that it can give up unless given"),
    ] = None,
    *,
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="seconds for the answers")] = 5.0,
    namespace: Namespace = None,
    device: DeviceName = None,
    pid: Pid = None,
    number: Number = None,
    as_json: Json = False,
) -> None:
    """Asks clients to shrink: spare pages first, then prefix cache. Prints what each gave.

    An engine answers between two steps, an idle one at once. Exit code 1 if one did not answer.

    Examples: kvctl trim · kvctl trim engine-0 --bytes 512MiB · kvctl trim 4711 --wait 0.5 --json
    """
    size_bytes = None if size is None else parse_size(size)
    opened = _find_device(namespace, device)
    wanted = None if client is None else _name_or_pid(client)
    answers = opened.shrink(wanted, size_bytes, pid=pid, number=number, wait_s=wait_s)
    _print(as_json, [asdict(answer) for answer in answers], lambda: answer_table(answers))
    if any(answer.outcome == "no answer" for answer in answers):
        raise typer.Exit(1)


def _name_or_pid(client: str) -> str | int:
    return int(client) if client.isdecimal() else client


def _find_device(namespace: str | None, device: str | None) -> Device:
    """Returns the only device in use that matches."""
    found = used_segments(namespace, device)
    names = ", ".join(f"--namespace {s.namespace} --device {s.device}" for s in found)
    if not found:
        raise UnknownDeviceError("no such device is in use; see kvctl list")
    if len(found) > 1:
        raise InvalidArgumentError(f"several devices are in use; pass one of: {names}")
    return found[0].open()


def _report(device: Device, client: str, change: Record, text: str, as_json: bool) -> None:
    where = {"namespace": device.namespace, "device": device.name, "client": client}
    if as_json:
        typer.echo(json.dumps({**where, **change}))
    else:
        typer.echo(f"{client} on {device.namespace}/{device.name}: {text}")
