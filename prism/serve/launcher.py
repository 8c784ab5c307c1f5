"""The life of one cluster on one machine: start everything, watch it, end everything."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console

from prism.config.admin import host_and_port
from prism.config.endpoints import on_node
from prism.config.resolved import ConfigFile, write_resolved
from prism.config.schema import ClusterConfig
from prism.errors import ConfigError
from prism.frontend.listener import admin_listener, bound_address, open_listener
from prism.messages.cluster import ClusterStatus
from prism.messages.models import ModelSpec
from prism.messages.troubles import read_troubles, write_troubles
from prism.process import LOG_LEVEL_VARIABLE, keep_private, raise_file_limit
from prism.queueing.server import BundledRedis
from prism.serve.children import Child, ChildSpec
from prism.serve.frontends import AgentLine, Frontend, replace_if_asked
from prism.serve.logs import REDIS_LOGS, log_names, rotate_full
from prism.serve.mps import FOLDER, MpsDaemon, wants_mps
from prism.serve.news import told
from prism.serve.node import forget_keys, joined, namespace_of
from prism.serve.preflight import check_exposure, check_ports, check_redis
from prism.serve.progress import Probe, admin_url_of, display, url_of
from prism.serve.reload import Reloads
from prism.serve.run_dir import DOWN_FILE, REDIS_FOLDER, REPLACE_FILE, RunDir, remove_ledgers, sweep
from prism.serve.supervisor import Supervisor

log = logging.getLogger(__name__)

_TICK_S = 0.2
_LOGS_EVERY_S = 2.0  # a folder of a user's own may hold many other files
_PROBE_EVERY_TICKS = 3
# Beyond its drain time a child may take this long to close sockets and give memory back.
_GRACE_S = 5.0
_AGENT_DRAIN_MAX_S = 10.0


@dataclass(frozen=True, slots=True)
class Options:
    """From the command line."""

    run_dir: Path | None = None
    log_dir: Path | None = None  # where logs survive the cluster
    log_level: str = "info"
    core_dumps: bool = False  # they hold prompts


class Signals:
    """Counts SIGTERM and SIGINT: the first ends the cluster in order, the next at once. SIGHUP asks
    for a reload, but where it says that the terminal is gone: then it counts as well."""

    def __init__(self) -> None:
        self.count = 0
        self._reload = False
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
        self._needs_terminal = not ignored and _has_terminal()

    @contextmanager
    def caught(self) -> Iterator[Signals]:
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {number: signal.signal(number, self._take) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def hurry(self) -> bool:
        return self.count > 1

    def wants_reload(self) -> bool:
        """Since the last call."""
        wanted, self._reload = self._reload, False
        return wanted

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGHUP or (self._needs_terminal and not _has_terminal()):
            self.count += 1
        else:
            self._reload = True


def _has_terminal() -> bool:
    """Whether this process has one that controls it."""
    try:
        os.close(os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def serve(config: ClusterConfig, options: Options, console: Console) -> None:
    """Serve until a signal; returns when nothing is left running and nothing left behind.

    Raises ConfigError (nothing was left running) or ClusterFailedError. Main thread only.
    """
    keep_private(core_dumps=options.core_dumps)
    raise_file_limit()
    with Signals().caught() as signals, ExitStack() as stack:
        doors = _doors(config, stack)
        sweep()
        run_dir = RunDir.create(options.run_dir, options.log_dir)
        stack.callback(run_dir.remove)
        redis_server = _redis(config, run_dir, stack)
        resolved = _resolved(config, run_dir, redis_server, doors)
        variables = _mps(resolved, run_dir, stack)
        write_resolved(resolved, run_dir.config_file)
        stack.callback(remove_ledgers, resolved)
        say = partial(_say, console)
        if resolved.node:
            stack.enter_context(joined(resolved, say))
        elif redis_server is None:
            stack.callback(forget_keys, resolved)
        variables[LOG_LEVEL_VARIABLE] = options.log_level
        line = stack.enter_context(AgentLine(resolved))
        frontends = _frontends(resolved, run_dir, doors, variables, line)
        children: list[list[Child]] = [*_others(resolved, run_dir, variables), [*frontends]]
        by_name = {each.name: each for each in frontends}
        supervisor = Supervisor(
            children,
            redis_server,
            say,
            resolved.hang_timeout_s,
            lambda name: by_name[name].bury() if name in by_name else None,
        )
        parts = [child.name for group in children for child in group]
        logs = log_names(parts, [device.name for device in resolved.local().devices])
        watch = Watch(supervisor, run_dir, resolved, logs, say)
        reloads = stack.enter_context(Reloads(run_dir.path, say))
        try:
            supervisor.start()
            _until_ready(resolved, watch, signals, console)
            supervisor.settled = True
            stack.enter_context(told(resolved, say))
            while not signals.count and not (run_dir.path / DOWN_FILE).exists():
                watch()
                replace_if_asked(run_dir.path / REPLACE_FILE, frontends, say)
                reloads.turn(signals.wants_reload())
                time.sleep(_TICK_S)
            say("shutting down: open requests are finished first; once more ends at once")
        finally:
            # Only the frontend holds these from here on: it refuses new requests by itself.
            for door in doors.values():
                door.close()
            supervisor.stop(signals.hurry)


def _doors(config: ClusterConfig, stack: ExitStack) -> dict[str, socket.socket]:
    """By the option that hands each to the frontends: they are opened here, so that ports are
    checked before anything starts, and stay open while a frontend is replaced. Raises
    ConfigError."""
    doors = {}
    if config.frontends_here:
        doors["--listen-fd"] = stack.enter_context(open_listener(config.host, config.port))
        check_exposure(config)
        if config.admin:
            doors["--admin-fd"] = stack.enter_context(admin_listener(config.admin))
    if config.node:
        check_ports(config)
    return doors


class Watch:
    """Called a few times a second: what was removed is made again, what has died is started
    again, full logs are emptied."""

    def __init__(
        self,
        supervisor: Supervisor,
        run_dir: RunDir,
        config: ClusterConfig,
        logs: re.Pattern[str],
        say: Callable[[str], None],
    ) -> None:
        self._supervisor, self._run_dir = supervisor, run_dir
        self._file = ConfigFile(run_dir.config_file, config)
        self._logs, self._say = logs, say
        self._warned: dict[str, str] = {}
        self._logs_due_s = 0.0

    def __call__(self) -> None:
        now_s = time.monotonic()
        self._try(f"{self._run_dir.path} cannot be repaired", self._repair)
        if now_s >= self._logs_due_s:
            self._logs_due_s = now_s + _LOGS_EVERY_S
            self._keep_logs()
        self._supervisor.watch(now_s)
        self._try("the state of the parts cannot be written", self._tell)

    def _keep_logs(self) -> None:
        redis_logs = self._run_dir.path / REDIS_FOLDER
        self._warn("logs cannot be kept", rotate_full(self._run_dir.logs, self._logs))
        self._warn("Redis's log cannot be kept", rotate_full(redis_logs, REDIS_LOGS))

    def _repair(self) -> None:
        if (newer := self._file.newer()) is not None:
            self._say(f"{newer.source} was read again (revision {newer.revision})")
        damage = self._file.damage
        if self._run_dir.repair(self._file.config, damaged=bool(damage)):
            self._say(
                f"something damaged {self._run_dir.config_file} ({damage}); it is written again"
                if damage
                else f"something removed files of {self._run_dir.path}; they are there again"
            )

    def _tell(self) -> None:
        """Compares with the file itself: a write may have failed, or the file been removed."""
        path, troubles = self._run_dir.path, self._supervisor.troubles
        if read_troubles(path) != troubles:
            write_troubles(path, troubles)

    def _try(self, what: str, act: Callable[[], None]) -> None:
        """What fails, as on a full disk, is tried again with the next call."""
        try:
            act()
        except (OSError, ConfigError) as error:
            self._warn(what, str(error))
        else:
            self._warn(what, "")

    def _warn(self, what: str, problem: str) -> None:
        """Once for each change: the same is found with every call."""
        if problem and problem != self._warned.get(what):
            log.warning("%s: %s", what, problem)
        self._warned[what] = problem


def _until_ready(
    config: ClusterConfig, watch: Callable[[], None], signals: Signals, console: Console
) -> None:
    if not config.frontends_here:
        return
    began_s = time.monotonic()
    probe = Probe(config)
    reason: str | None = "starting"
    tick = 0
    with display(console) as show:
        while not signals.count and reason is not None:
            watch()
            if tick % _PROBE_EVERY_TICKS == 0:
                reason = probe.reason()
                show(reason or "ready", probe.status())
            tick += 1
            time.sleep(_TICK_S)
    if reason is None:
        _announce(config, time.monotonic() - began_s, probe.status(), console.print)
    probe.close()


def _announce(
    config: ClusterConfig, seconds: float, status: ClusterStatus | None, say: Callable[..., None]
) -> None:
    url = url_of(config)
    say(f"[bold green]ready[/] in {seconds:.1f} s: {url}/v1", highlight=False, soft_wrap=True)
    refusals = status.refusals if status else {}
    for line in (
        *(f"note:   {model} has no place now: {why}" for model, why in refusals.items()),
        f"models: {', '.join(m.name for m in config.models)}",
        f"try:    curl {url}{_example(config.models[0])}",
        *([f"admin:  {_admin_text(config)}"] if config.admin else []),
        f"state:  prism-serve status --run-dir {config.run_dir}; Ctrl-C ends everything",
    ):
        say(line, markup=False, highlight=False, soft_wrap=True)


def _example(model: ModelSpec) -> str:
    path, asked = "completions", '"prompt": "Hello", "max_tokens": 16'
    if model.embedding:
        path, asked = "embeddings", '"input": "Hello"'
    header = "-H 'Content-Type: application/json'"
    return f'/v1/{path} {header} -d \'{{"model": "{model.name}", {asked}}}\''


def _admin_text(config: ClusterConfig) -> str:
    if host_and_port(config.admin) is not None:
        return f"{admin_url_of(config)}/dashboard"
    return f"curl --unix-socket {config.admin} http://localhost/status"


def _others(
    config: ClusterConfig, run_dir: RunDir, variables: Mapping[str, str]
) -> list[list[Child]]:
    """In the order of starting, before the frontends; they are ended in the reverse one."""
    arguments, local = ("--config", str(run_dir.config_file)), config.local()
    drain_s = config.engine.drain_timeout_s
    scheduler = ChildSpec("scheduler", "prism.cluster", arguments, _GRACE_S)
    agents = [
        ChildSpec(
            f"agent-{device.name.replace(':', '')}",
            "prism.agent",
            (*arguments, "--device", on_node(device.name, config.node)),
            # The frontends have ended by then, and with them every request.
            min(drain_s, _AGENT_DRAIN_MAX_S) + _GRACE_S,
        )
        for device in local.devices
    ]
    preloaded = [
        _preloaded(config, device.name, adapter, arguments)
        for device in local.devices
        for adapter in config.adapters_on(on_node(device.name, config.node))
    ]
    groups = ([scheduler, *preloaded], agents)
    return [[Child(spec, run_dir.logs, variables) for spec in group] for group in groups]


def _preloaded(
    config: ClusterConfig, device: str, adapter: str, arguments: tuple[str, ...]
) -> ChildSpec:
    """The imports of the device's engines."""
    path = str(config.preloaded_path(device, adapter))
    more = ("--adapter", adapter, "--device", device, "--preloaded", path)
    return ChildSpec(
        config.preloaded_name(device, adapter),
        "prism.engines.forkserver",
        (*arguments, *more),
        _GRACE_S,
        python=config.engine.python.get(adapter, sys.executable),
    )


def _frontends(
    config: ClusterConfig,
    run_dir: RunDir,
    doors: Mapping[str, socket.socket],
    variables: Mapping[str, str],
    line: AgentLine,
) -> list[Frontend]:
    fds = {option: door.fileno() for option, door in doors.items()}
    inherited = [word for option, fd in fds.items() for word in (option, str(fd))]
    spec = ChildSpec(
        "",
        "prism.frontend",
        ("--config", str(run_dir.config_file), *inherited),
        config.engine.drain_timeout_s + _GRACE_S,
        tuple(fds.values()),
        # It was checked at the start: one model's files must not keep the others from being served.
        restart_arguments=("--without-unreadable",),
    )
    slots = [f"f{number}" for number in range(config.frontends_here)]
    return [Frontend(slot, spec, run_dir.logs, variables, line) for slot in slots]


def _mps(config: ClusterConfig, run_dir: RunDir, stack: ExitStack) -> dict[str, str]:
    """What makes children clients of MPS, which runs from now on; empty where it is not wanted."""
    if not wants_mps(config.local()):
        return {}
    return stack.enter_context(MpsDaemon(run_dir.path / FOLDER)).variables


def _redis(config: ClusterConfig, run_dir: RunDir, stack: ExitStack) -> BundledRedis | None:
    """The bundled server, started; None where the user names one, which must answer."""
    if config.redis_url:
        asyncio.run(check_redis(config.redis_url))
        return None
    directory = run_dir.path / REDIS_FOLDER
    directory.mkdir()
    return stack.enter_context(BundledRedis(directory))


def _resolved(
    config: ClusterConfig,
    run_dir: RunDir,
    redis_server: BundledRedis | None,
    doors: Mapping[str, socket.socket],
) -> ClusterConfig:
    listener, admin = doors.get("--listen-fd"), doors.get("--admin-fd")
    return msgspec.structs.replace(
        config,
        namespace=namespace_of(config) if config.node else f"prism-{secrets.token_hex(4)}",
        run_dir=str(run_dir.path),
        redis_url=redis_server.url if redis_server else config.redis_url,
        port=listener.getsockname()[1] if listener else config.port,
        admin=bound_address(config.admin, admin) if admin else "",
        preloaded=True,
    )


def _say(console: Console, line: str) -> None:
    """A full disk under this output is no reason to end."""
    with suppress(OSError):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
