"""`prism-serve`: serves many models on few devices, and operates a running cluster."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from prism.cli import completion, keys, watch
from prism.cli.exit_codes import run
from prism.cli.init import init
from prism.cli.terminal import new_console
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import on_node
from prism.config.schema.machines import is_gpu
from prism.errors import ConfigError
from prism.messages.agent import ActionResult
from prism.messages.cluster import ClusterStatus, OperatorCommand
from prism.serve import operator
from prism.serve.console import report, status_tables
from prism.serve.node.gpu_probe import GpuFound
from prism.serve.node.run_dir import find

# Modules of commands that start processes are imported where they are used: they take seconds.
DEFAULT_CONFIG = Path("prism.yaml")
_STATUS_TIMEOUT_S = 10.0
_ACTION_TIMEOUT_S = 300.0

app = typer.Typer(
    name="prism-serve",
    help="Serve many models on few devices with one OpenAI-compatible endpoint. Without a"
    " command: up. init writes a first YAML.",
    pretty_exceptions_enable=False,
)

Yaml = Annotated[Path | None, typer.Argument(metavar="[YAML]")]
Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="The cluster's YAML; default prism.yaml.")
]
NewRunDir = Annotated[
    Path | None,
    typer.Option("--run-dir", help="Directory of sockets, logs and state, removed at the end."),
]
RunDirOption = Annotated[
    Path | None,
    typer.Option("--run-dir", help="The cluster, if several are running (printed at its start)."),
]
Host = Annotated[str | None, typer.Option("--host", help="Overrides frontend.host.")]
Port = Annotated[int | None, typer.Option("--port", "-p", help="Overrides frontend.port.")]
Node = Annotated[str | None, typer.Option("--node", help="This machine, if there are several.")]
Ray = Annotated[
    str | None,
    typer.Option("--ray", help="Ray starts all machines of the YAML: auto, or HOST:PORT."),
]
LogDir = Annotated[Path | None, typer.Option("--log-dir", help="Directory of logs that are kept.")]
LogLevel = Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")]
CoreDumps = Annotated[
    bool, typer.Option("--core-dumps", help="Allow core files of crashes, which contain prompts.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Drained = Annotated[str, typer.Argument(metavar="DEVICE|@NODE", autocompletion=completion.devices)]
Model = Annotated[str, typer.Argument(metavar="MODEL", autocompletion=completion.models)]


@app.callback(
    invoke_without_command=True,
    epilog="Examples: prism-serve check prism.yaml   |   prism-serve up prism.yaml   |"
    "   prism-serve status --json   |   prism-serve evict llama   |   prism-serve down",
)
def default(
    context: typer.Context,
    *,
    config: Config = None,
    run_dir: NewRunDir = None,
    host: Host = None,
    port: Port = None,
    node: Node = None,
    ray: Ray = None,
    log_dir: LogDir = None,
    log_level: LogLevel = "info",
    core_dumps: CoreDumps = False,
) -> None:
    """Starts everything and serves until Ctrl-C. The same as `up`."""
    if context.invoked_subcommand is None:
        up(
            config=config,
            run_dir=run_dir,
            host=host,
            port=port,
            node=node,
            ray=ray,
            log_dir=log_dir,
            log_level=log_level,
            core_dumps=core_dumps,
        )


@app.command(epilog="Example: prism-serve up prism.yaml --port 8080 --log-dir logs")
def up(
    source: Yaml = None,
    *,
    config: Config = None,
    run_dir: NewRunDir = None,
    host: Host = None,
    port: Port = None,
    node: Node = None,
    ray: Ray = None,
    log_dir: LogDir = None,
    log_level: LogLevel = "info",
    core_dumps: CoreDumps = False,
) -> None:
    """Starts everything and serves until Ctrl-C."""
    from prism.serve.launcher import Options, serve
    from prism.serve.on_ray import command as on_ray

    config = _one_of(source, config)
    ray = ray or on_ray.ray_address(config or DEFAULT_CONFIG)
    if ray is not None and node is None:
        named = {"--host": host, "--port": port, "--log-dir": log_dir, "--log-level": log_level}
        on_ray.serve(config or DEFAULT_CONFIG, ray, named, partial(print, flush=True))
    else:
        options = Options(run_dir, log_dir, _level(log_level), core_dumps)
        from prism.frontend.text.model_texts import check_texts

        found, _ = _probed(_load(config, host, port, node, download=True))
        check_texts(found)
        _warn(found)
        serve(found, options, new_console())


@app.command(epilog="Example: prism-serve check prism.yaml")
def check(
    source: Yaml = None,
    *,
    config: Config = None,
    host: Host = None,
    port: Port = None,
    node: Node = None,
) -> None:
    """Checks the YAML, models' files, GPUs and addresses, and shows what fits. Starts and downloads
    nothing."""
    from prism.frontend.text.model_texts import check_texts
    from prism.serve.node.preflight import check_addresses

    loaded = _load(_one_of(source, config), host, port, node)
    checked, gpus = _probed(loaded, may_be_occupied=True)
    notes = check_addresses(checked)
    check_texts(checked)
    new_console().print(report.configuration(checked, gpus))
    for note in notes:
        print(note, file=sys.stderr)
    _warn(checked)


@app.command(epilog="Example: prism-serve status --json --run-dir /tmp/prism-a1b2c3d4")
def status(*, as_json: AsJson = False, run_dir: RunDirOption = None) -> None:
    """Shows devices, models, memory and queues of the running cluster."""
    command = OperatorCommand("status")
    result = operator.ask(find(run_dir), command, _STATUS_TIMEOUT_S)
    if as_json:
        print(result.message)
    else:
        shown = msgspec.json.decode(result.message, type=ClusterStatus)
        new_console().print(status_tables.cluster(shown))


@app.command(epilog="Examples: prism-serve top --interval 0.5   |   prism-serve top --once --json")
def top(
    *,
    interval: Annotated[float, typer.Option("--interval", "--every", help="Seconds.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture.")] = False,
    as_json: AsJson = False,
    run_dir: RunDirOption = None,
) -> None:
    """Shows the running cluster live: memory of each device, models, waiting requests."""
    if interval <= 0:
        raise ConfigError(f"--interval: {interval:g} must be more than 0; give seconds, such as 1")
    watch.show(find(run_dir), new_console(), interval, once=once, as_json=as_json)


@app.command(epilog="Examples: prism-serve logs   |   prism-serve logs frontend-f0 --follow")
def logs(
    parts: Annotated[list[str] | None, typer.Argument(metavar="[PART]...")] = None,
    *,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Number of lines of each log.")] = 10,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until Ctrl-C.")] = False,
    run_dir: RunDirOption = None,
) -> None:
    """Prints the ends of the logs of PARTs (frontend-f0, scheduler, agent-host0, ...) or of all."""
    if code := watch.logs(find(run_dir), parts or [], lines, follow=follow):
        raise typer.Exit(code)


@app.command(
    epilog="Examples: prism-serve activate tiny-llama   |   prism-serve activate tiny-llama"
    " --device host:1   |   prism-serve activate tiny-llama --gpu 0 --profile"
)
def activate(
    model: Model,
    *,
    device: Annotated[
        str | None,
        typer.Option(help="Default: the policy's choice.", autocompletion=completion.devices),
    ] = None,
    gpu: Annotated[int | None, typer.Option(help="Device, by its number.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Print times of stages.")] = False,
    as_json: AsJson = False,
    run_dir: RunDirOption = None,
) -> None:
    """Activates MODEL now, before a request needs it."""
    if gpu is not None:
        device = _device_of(find(run_dir), gpu, device)
    result = _operate(OperatorCommand("activate", model, device), as_json, run_dir)
    if profile and not as_json:
        new_console().print(report.activation(result))


@app.command(epilog="Example: prism-serve migrate tiny-llama host:1")
def migrate(
    model: Model,
    device: Annotated[str, typer.Argument(metavar="DEVICE", autocompletion=completion.devices)],
    *,
    as_json: AsJson = False,
    run_dir: RunDirOption = None,
) -> None:
    """Moves MODEL to DEVICE. Running requests finish or move, by scheduler.migrate_running."""
    _operate(OperatorCommand("activate", model, device), as_json, run_dir)


@app.command(epilog="Example: prism-serve evict tiny-llama")
def evict(model: Model, *, as_json: AsJson = False, run_dir: RunDirOption = None) -> None:
    """Evicts MODEL from its device. The next request activates it again."""
    _operate(OperatorCommand("evict", model), as_json, run_dir)


@app.command(epilog="Example: prism-serve prefetch tiny-llama")
def prefetch(
    model: Model,
    *,
    device: Annotated[
        str | None,
        typer.Option(help="Its machine; default: all.", autocompletion=completion.devices),
    ] = None,
    as_json: AsJson = False,
    run_dir: RunDirOption = None,
) -> None:
    """Reads MODEL's files into the weight store, so that an activation does not read the disk."""
    _operate(OperatorCommand("prefetch", model, device), as_json, run_dir)


@app.command(epilog="Examples: prism-serve flush   |   prism-serve flush tiny-llama")
def flush(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", autocompletion=completion.models)
    ] = None,
    *,
    as_json: AsJson = False,
    run_dir: RunDirOption = None,
) -> None:
    """Returns idle memory (spare pages and the prefix cache) of MODEL, or of all models."""
    _operate(OperatorCommand("flush", model), as_json, run_dir)


@app.command(epilog="Example: prism-serve drain host:1")
def drain(device: Drained, *, run_dir: RunDirOption = None) -> None:
    """Stops placing models on DEVICE, or on all devices of NODE, moves or evicts their models, and
    waits until they are empty."""
    from prism.serve import drain as drains

    config, began_s = find(run_dir), time.monotonic()
    drains.drain(config, drains.matching_devices(config, device), partial(print, flush=True))
    if device.startswith("@"):
        print(f"prism-serve on {device[1:]} may be stopped now: no request uses its devices")
    print(
        f"{device} is empty after {time.monotonic() - began_s:.1f} s, and stays empty until"
        f" prism-serve undrain {device}"
    )


@app.command(epilog="Example: prism-serve undrain host:1")
def undrain(device: Drained, *, run_dir: RunDirOption = None) -> None:
    """Allows models on DEVICE, or on all devices of NODE, again."""
    from prism.serve import drain as drains

    config = find(run_dir)
    for name in drains.matching_devices(config, device):
        drains.ask(config, "undrain", name)
    print(f"{device} may have models again")


app.command(
    epilog="Examples: prism-serve init   |   prism-serve init gpu.yaml --model Qwen/Qwen3-0.6B"
)(init)
app.command("new-key", epilog="Example: prism-serve new-key alice --keys keys.yaml --model llama")(
    keys.new_key
)
app.command("new-cluster-key", epilog="Example: prism-serve new-cluster-key cluster.key")(
    keys.new_cluster_key
)


@app.command(epilog="Examples: prism-serve reload   |   prism-serve reload prism.yaml")
def reload(
    source: Annotated[Path | None, typer.Argument(metavar="[YAML]")] = None,
    *,
    run_dir: RunDirOption = None,
) -> None:
    """Applies YAML (default: the cluster's file) to the running cluster: adds and removes models,
    changes SLOs and limits. No request is dropped. A file with a mistake changes nothing."""
    from prism.serve import reload_command

    print(f"reloaded: {reload_command.summary(reload_command.reload(run_dir, source))}")


@app.command("replace-frontends", epilog="Example: prism-serve replace-frontends")
def replace_frontends(*, run_dir: RunDirOption = None) -> None:
    """Starts new frontend processes on the same port. The present ones finish and end."""
    operator.replace_frontends(find(run_dir), _STATUS_TIMEOUT_S)
    print("new frontends are starting; the present ones finish their open requests and end")


@app.command(epilog="Examples: prism-serve down   |   prism-serve down --here")
def down(
    *,
    here: Annotated[
        bool, typer.Option("--here", help="With Ray: only on this machine. Ray starts it again.")
    ] = False,
    run_dir: RunDirOption = None,
) -> None:
    """Ends the running cluster like Ctrl-C: finishes open requests and cleans up."""
    operator.down(find(run_dir), here=here)
    print("prism-serve has ended")


@app.command(hidden=True, context_settings={"ignore_unknown_options": True})
def stop(_given: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Names the command that ends a cluster, in place of the suggestion `top`."""
    raise ConfigError("stop: is not a command; did you mean 'prism-serve down'?")


def main() -> None:
    """Runs the command. Exit codes: 0 success, 1 a failure of the cluster or the action, 2 wrong
    input."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run(app, "error")


def _one_of(source: Path | None, config: Path | None) -> Path | None:
    """Returns the YAML of the argument or of --config. Raises ConfigError for two files."""
    if source is not None and config is not None and source.absolute() != config.absolute():
        raise ConfigError(
            f"--config: {config} cannot be combined with {source}; remove one of them"
        )
    return source or config


def _load(
    config: Path | None,
    host: str | None,
    port: int | None,
    node: str | None,
    *,
    download: bool = False,
) -> ClusterConfig:
    from prism.config.checks.nodes import check_node
    from prism.config.resolve import load
    from prism.models.hub.hub_model import cached, fetched
    from prism.serve.node.preflight import check_machine

    if config is None and not DEFAULT_CONFIG.is_file():
        raise ConfigError(
            "--config: is missing, and prism.yaml does not exist here; give the cluster's YAML, or"
            " write one for this machine with prism-serve init"
        )
    say = partial(print, file=sys.stderr, flush=True)
    of_hub = partial(fetched, say=say) if download else cached
    loaded = load(config or DEFAULT_CONFIG, node=node or "", of_hub=of_hub)
    check_node(loaded)
    _check_installed(loaded)
    check_machine(loaded)
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(
            f"--port: {port} is not a valid port; choose 1 to 65535, or 0 for any free one"
        )
    return msgspec.structs.replace(
        loaded, host=host or loaded.host, port=loaded.port if port is None else port
    )


def _probed(
    config: ClusterConfig, *, may_be_occupied: bool = False
) -> tuple[ClusterConfig, dict[str, GpuFound]]:
    """Returns the configuration with measured GPUs. They are numbered as by nvidia-smi, here and in
    every child."""
    if not any(is_gpu(device.name) for device in config.local().devices):
        return config, {}
    from prism.config.resolve import measured
    from prism.serve.node import gpu_probe

    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    asked = gpu_probe.probe(config.local(), may_be_occupied=may_be_occupied)
    gpus = {on_node(name, config.node): found for name, found in asked.items()}
    for warning in gpu_probe.warnings(gpus):
        print(warning, file=sys.stderr)
    return measured(config, gpu_probe.contexts(gpus)), gpus


def _check_installed(config: ClusterConfig) -> None:
    """Raises ConfigError if an engine's package is missing, instead of engines that fail
    repeatedly."""
    used = {config.adapter_of(model) for model in config.models} - set(config.engine.python)
    if "sglang" in used and find_spec("sglang") is None:
        raise ConfigError(
            "engine.adapter: SGLang is not installed with prism-serve; install it with"
            " scripts/install of a checkout, or use the adapter fake"
        )


def _level(name: str) -> str:
    if name.lower() not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"--log-level: unknown {name!r}; choose debug, info, warning or error")
    return name.lower()


def _operate(command: OperatorCommand, as_json: bool, run_dir: Path | None) -> ActionResult:
    config = find(run_dir)
    _check_known(config, command)
    timeout_s = max(_ACTION_TIMEOUT_S, 2 * config.engine.activation_timeout_s)
    result = operator.ask(config, command, timeout_s)
    if as_json:
        shown = {"ok": result.ok, "message": result.message, "seconds": result.seconds}
        known = {"stages_s": result.stages_s, "link_bytes": result.link_bytes}
        print(json.dumps(shown | {name: what for name, what in known.items() if what}))
    elif result.ok:
        print(result.message or "done")
    else:
        print(f"error: {result.message or 'failed'}", file=sys.stderr)
    if not result.ok:
        raise typer.Exit(1)
    return result


def _check_known(config: ClusterConfig, command: OperatorCommand) -> None:
    """Raises ConfigError that lists the models or devices."""
    models, devices = [m.name for m in config.models], [d.name for d in config.devices]
    if command.model in [model.name for model in config.external]:
        raise ConfigError(f"{command.model} is external: its own servers load it, not Prism")
    for what, name, known in (
        ("model", command.model, models),
        ("device", command.device, devices),
    ):
        if name is not None and name not in known:
            raise ConfigError(f"unknown {what} {name!r}; {what}s: {', '.join(known)}")


def _device_of(config: ClusterConfig, gpu: int, device: str | None) -> str:
    """Returns the device with this number, of any kind. Raises ConfigError that lists the
    devices."""
    if device is not None:
        raise ConfigError("--gpu: cannot be combined with --device; remove one of them")
    names = [d.name for d in config.devices]
    found = [name for name in names if name.endswith(f":{gpu}")]
    if len(found) != 1:
        what = "is not a device" if not found else f"may be {' or '.join(found)}: use --device"
        raise ConfigError(f"--gpu: {gpu} {what}; devices: {', '.join(names)}")
    return found[0]


def _warn(config: ClusterConfig) -> None:
    from prism.policies import registry

    for line in registry.refused():
        print(f"warning: {line}", file=sys.stderr)
    if warning := report.memory_warning(config.local()):
        print(warning, file=sys.stderr)
