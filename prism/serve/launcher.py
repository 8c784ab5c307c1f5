"""Life of one cluster on one machine: start, supervision and end of its processes."""

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

from prism.config.resolved import ConfigFile, write_resolved
from prism.config.schema.cluster_config import ClusterConfig
from prism.config.schema.endpoints import on_node
from prism.errors import ConfigError
from prism.frontend.http.listener import admin_listener, bound_address, open_listener
from prism.messages.troubles import read_troubles, write_troubles
from prism.process import LOG_LEVEL_VARIABLE, keep_private, raise_file_limit
from prism.queueing.server import BundledRedis
from prism.serve.console.engine_restarts import print_engine_restarts
from prism.serve.console.progress import Probe, display
from prism.serve.console.ready import print_ready
from prism.serve.node.mps import FOLDER, MpsDaemon, wants_mps
from prism.serve.node.preflight import check_exposure, check_ports, check_redis
from prism.serve.node.registration import delete_redis_keys, joined, namespace_of
from prism.serve.node.run_dir import (
    DOWN_FILE,
    REDIS_FOLDER,
    REPLACE_FILE,
    RunDir,
    remove_ledgers,
    sweep,
)
from prism.serve.processes.children import Child, ChildSpec
from prism.serve.processes.frontends import AgentNotifier, Frontend, replace_if_requested
from prism.serve.processes.logs import REDIS_LOGS, log_names, rotate_full
from prism.serve.processes.supervisor import Supervisor
from prism.serve.reload_command import Reloads

log = logging.getLogger(__name__)

_TICK_S = 0.2
_LOGS_INTERVAL_S = 2.0  # a user's log folder may have many other files
_PROBE_EVERY_TICKS = 3
# Time after the drain time in which a child closes sockets and returns memory.
_GRACE_S = 5.0
_AGENT_DRAIN_MAX_S = 10.0


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line."""

    run_dir: Path | None = None
    log_dir: Path | None = None  # directory of logs that outlive the cluster
    log_level: str = "info"
    core_dumps: bool = False  # core files contain prompts


class Signals:
    """Counter of SIGTERM and SIGINT: the first one ends the cluster in order, the next one at once.
    SIGHUP asks for a reload. If it means that the terminal is gone, it counts as SIGTERM."""

    def __init__(self) -> None:
        self.count = 0
        self._reload = False
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
        self._ends_with_terminal = not ignored and _has_terminal()

    @contextmanager
    def caught(self) -> Iterator[Signals]:
        """Handles the signals within the block."""
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        before = {number: signal.signal(number, self._take) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def wants_immediate_stop(self) -> bool:
        """Returns True after the second signal."""
        return self.count > 1

    def wants_reload(self) -> bool:
        """Returns True if a reload was asked for since the last call."""
        wanted, self._reload = self._reload, False
        return wanted

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGHUP or (self._ends_with_terminal and not _has_terminal()):
            self.count += 1
        else:
            self._reload = True


def _has_terminal() -> bool:
    """Returns True if this process has a controlling terminal."""
    try:
        os.close(os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def serve(config: ClusterConfig, options: Options, console: Console) -> None:
    """Serves until a signal. Returns when all processes have ended and everything is cleaned up.

    Raises ConfigError (nothing was left running) or ClusterFailedError. Main thread only.
    """
    keep_private(core_dumps=options.core_dumps)
    raise_file_limit()
    with Signals().caught() as signals, ExitStack() as stack:
        listeners = _listeners(config, stack)
        sweep()
        run_dir = RunDir.create(options.run_dir, options.log_dir)
        stack.callback(run_dir.remove)
        redis_server = _redis(config, run_dir, stack)
        resolved = _resolved(config, run_dir, redis_server, listeners)
        variables = _mps(resolved, run_dir, stack)
        write_resolved(resolved, run_dir.config_file)
        stack.callback(remove_ledgers, resolved)
        say = partial(_say, console)
        if resolved.node:
            stack.enter_context(joined(resolved, say))
        elif redis_server is None:
            stack.callback(delete_redis_keys, resolved)
        variables[LOG_LEVEL_VARIABLE] = options.log_level
        notifier = stack.enter_context(AgentNotifier(resolved))
        frontends = _frontends(resolved, run_dir, listeners, variables, notifier)
        children: list[list[Child]] = [
            *_other_children(resolved, run_dir, variables),
            [*frontends],
        ]
        by_name = {each.name: each for each in frontends}
        supervisor = Supervisor(
            children,
            redis_server,
            say,
            resolved.hang_timeout_s,
            lambda name: by_name[name].report_end() if name in by_name else None,
        )
        parts = [child.name for group in children for child in group]
        logs = log_names(parts, [device.name for device in resolved.local().devices])
        maintain = Maintenance(supervisor, run_dir, resolved, logs, say)
        reloads = stack.enter_context(Reloads(run_dir.path, say))
        try:
            supervisor.start()
            _until_ready(resolved, maintain, signals, console)
            supervisor.settled = True
            stack.enter_context(print_engine_restarts(resolved, say))
            while not signals.count and not (run_dir.path / DOWN_FILE).exists():
                maintain()
                replace_if_requested(run_dir.path / REPLACE_FILE, frontends, say)
                reloads.step(signals.wants_reload())
                time.sleep(_TICK_S)
            say("shutting down: finishing open requests; repeat to end at once")
        finally:
            # From here on only the frontend has the listeners, and it rejects new requests.
            for listener in listeners.values():
                listener.close()
            supervisor.stop(signals.wants_immediate_stop)


def _listeners(config: ClusterConfig, stack: ExitStack) -> dict[str, socket.socket]:
    """Returns the frontends' sockets by the option that passes each. The launcher opens them to
    check ports before anything starts, and keeps them open while a frontend is replaced. Raises
    ConfigError."""
    listeners = {}
    if config.frontends_here:
        listeners["--listen-fd"] = stack.enter_context(open_listener(config.host, config.port))
        check_exposure(config)
        if config.admin:
            listeners["--admin-fd"] = stack.enter_context(admin_listener(config.admin))
    if config.node:
        check_ports(config)
    return listeners


class Maintenance:
    """Periodic maintenance: restores removed files, restarts dead processes and rotates full
    logs."""

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
        self._logged: dict[str, str] = {}
        self._logs_due_s = 0.0

    def __call__(self) -> None:
        """Runs the maintenance that is due. Call it a few times a second."""
        now_s = time.monotonic()
        self._attempt(f"{self._run_dir.path} cannot be repaired", self._repair)
        if now_s >= self._logs_due_s:
            self._logs_due_s = now_s + _LOGS_INTERVAL_S
            self._keep_logs()
        self._supervisor.watch(now_s)
        self._attempt("the state of the processes cannot be written", self._write_troubles)

    def _keep_logs(self) -> None:
        redis_logs = self._run_dir.path / REDIS_FOLDER
        self._warn("logs cannot be rotated", rotate_full(self._run_dir.logs, self._logs))
        self._warn("Redis's log cannot be rotated", rotate_full(redis_logs, REDIS_LOGS))

    def _repair(self) -> None:
        if (newer := self._file.newer()) is not None:
            self._say(f"reloaded {newer.source} (revision {newer.revision})")
        damage = self._file.damage
        if self._run_dir.repair(self._file.config, damaged=bool(damage)):
            self._say(
                f"{self._run_dir.config_file} was damaged ({damage}) and has been restored"
                if damage
                else f"files of {self._run_dir.path} were removed and have been restored"
            )

    def _write_troubles(self) -> None:
        """Writes the supervisor's troubles, unless the file already has them: an earlier write may
        have failed, or the file may have been removed."""
        path, troubles = self._run_dir.path, self._supervisor.troubles
        if read_troubles(path) != troubles:
            write_troubles(path, troubles)

    def _attempt(self, what: str, act: Callable[[], None]) -> None:
        """Calls `act`. A failure, such as a full disk, is logged, and the next call tries again."""
        try:
            act()
        except (OSError, ConfigError) as error:
            self._warn(what, str(error))
        else:
            self._warn(what, "")

    def _warn(self, what: str, problem: str) -> None:
        """Logs a problem when it changes, since every call finds the same one."""
        if problem and problem != self._logged.get(what):
            log.warning("%s: %s", what, problem)
        self._logged[what] = problem


def _until_ready(
    config: ClusterConfig, maintain: Callable[[], None], signals: Signals, console: Console
) -> None:
    """Shows the start until the cluster is ready or a signal comes."""
    if not config.frontends_here:
        return
    began_s = time.monotonic()
    probe = Probe(config)
    reason: str | None = "starting"
    tick = 0
    with display(console) as show:
        while not signals.count and reason is not None:
            maintain()
            if tick % _PROBE_EVERY_TICKS == 0:
                reason = probe.reason()
                show(reason or "ready", probe.status())
            tick += 1
            time.sleep(_TICK_S)
    if reason is None:
        print_ready(config, time.monotonic() - began_s, probe.status(), console)
    probe.close()


def _other_children(
    config: ClusterConfig, run_dir: RunDir, variables: Mapping[str, str]
) -> list[list[Child]]:
    """Returns the groups of children other than frontends, in the order of their start."""
    arguments, local = ("--config", str(run_dir.config_file)), config.local()
    drain_s = config.engine.drain_timeout_s
    scheduler = ChildSpec("scheduler", "prism.cluster", arguments, _GRACE_S)
    agents = [
        ChildSpec(
            f"agent-{device.name.replace(':', '')}",
            "prism.agent",
            (*arguments, "--device", on_node(device.name, config.node)),
            # The frontends have ended before, and with them every request.
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
    """Returns the process that keeps imports of the device's engines ready."""
    path = str(config.preloaded_path(device, adapter))
    more = ("--adapter", adapter, "--device", device, "--preloaded", path)
    return ChildSpec(
        config.preloaded_name(device, adapter),
        "prism.engines.processes.forkserver",
        (*arguments, *more),
        _GRACE_S,
        python=config.engine.python.get(adapter, sys.executable),
    )


def _frontends(
    config: ClusterConfig,
    run_dir: RunDir,
    listeners: Mapping[str, socket.socket],
    variables: Mapping[str, str],
    notifier: AgentNotifier,
) -> list[Frontend]:
    fds = {option: listener.fileno() for option, listener in listeners.items()}
    inherited = [word for option, fd in fds.items() for word in (option, str(fd))]
    spec = ChildSpec(
        "",
        "prism.frontend",
        ("--config", str(run_dir.config_file), *inherited),
        config.engine.drain_timeout_s + _GRACE_S,
        tuple(fds.values()),
        # Files were checked at the start. Later, those of one model must not affect the others.
        restart_arguments=("--without-unreadable",),
    )
    slots = [f"f{number}" for number in range(config.frontends_here)]
    return [Frontend(slot, spec, run_dir.logs, variables, notifier) for slot in slots]


def _mps(config: ClusterConfig, run_dir: RunDir, stack: ExitStack) -> dict[str, str]:
    """Starts MPS if it is configured. Returns environment variables that make children its
    clients."""
    if not wants_mps(config.local()):
        return {}
    return stack.enter_context(MpsDaemon(run_dir.path / FOLDER)).variables


def _redis(config: ClusterConfig, run_dir: RunDir, stack: ExitStack) -> BundledRedis | None:
    """Starts the bundled server. Returns None if the user's server is used, which must answer."""
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
    listeners: Mapping[str, socket.socket],
) -> ClusterConfig:
    """Returns the configuration that all processes read."""
    listener, admin = listeners.get("--listen-fd"), listeners.get("--admin-fd")
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
    """Prints a line. A full disk below the output must not end the cluster."""
    with suppress(OSError):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
