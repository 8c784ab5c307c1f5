"""Engine, or one rank of it, in a fresh process that imports the adapter itself.

    python -m prism.engines.processes.fresh_engine --adapter NAME --config PATH --device cuda:0
        --engine-id ID

The fork server starts engines like this if it must not fork: CUDA that a parent has initialised
cannot be used in its forked children. A fresh engine otherwise behaves like a forked one: one
process and one log for each engine, death with the parent, the same exit status. Each fresh process
imports the adapter again and shares none of its memory with the others.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from prism.config.checks.adapters import adapter_named
from prism.config.resolved import read_resolved
from prism.engines.core import EngineContext
from prism.engines.processes.rank_launch import RankLaunch, launch_ranks, run_follower
from prism.engines.processes.worker import run_engine
from prism.errors import RankLostError
from prism.messages.forking import ForkEngine
from prism.process import (
    child_environment,
    configure_logging,
    die_with_parent,
    flush_log,
    open_log,
)

SM_VARIABLE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
THREAD_SETTINGS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

log = logging.getLogger("prism.engine")


def start(order: ForkEngine, adapter: str, config_path: Path, device: str) -> int:
    """Starts an engine; returns its pid. Raises OSError if the process cannot be started."""
    arguments = ["--adapter", adapter, "--config", str(config_path), "--device", device]
    arguments += ["--engine-id", order.engine_id]
    for peer in order.peers:
        arguments += ["--peer", peer]
    # Read when the process makes its CUDA context.
    return _spawn(arguments, {SM_VARIABLE: str(order.sm_percent)})


def start_rank(launch: RankLaunch, adapter: str, config_path: Path) -> int:
    """Starts a rank above 0, which inherits its end of the socket; returns its pid."""
    link_fd, context = launch.link.fileno(), launch.context
    os.set_inheritable(link_fd, True)
    arguments = ["--adapter", adapter, "--config", str(config_path), "--device", context.device]
    arguments += ["--engine-id", context.engine_id, "--rank", str(launch.rank)]
    arguments += ["--link", str(link_fd), "--folder", str(launch.folder)]
    for device in context.rank_devices:
        arguments += ["--peer", device]
    return _spawn(arguments, {})


def _spawn(arguments: Sequence[str], environment: dict[str, str]) -> int:
    command = [sys.executable, "-m", "prism.engines.processes.fresh_engine", *arguments]
    return os.posix_spawn(sys.executable, command, child_environment() | environment)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m prism.engines.processes.fresh_engine", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--engine-id", required=True)
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        help="device of rank 1, 2, ...; with --rank the devices of all ranks",
    )
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--link", type=int, help="file descriptor of the socket to rank 0")
    parser.add_argument("--folder", type=Path, help="folder of the ranks' rendezvous files")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    die_with_parent()
    options = parse(arguments)
    config = read_resolved(options.config).local()
    if options.rank == 0:
        redirect_to_log(Path(config.run_dir) / "logs" / f"{options.engine_id}.log")
    log_to_stderr(options.engine_id)
    for name in THREAD_SETTINGS:
        os.environ.setdefault(name, "1")
    context = EngineContext(options.engine_id, options.device, config)
    try:
        return _follow(context, options) if options.rank else _lead(context, options)
    except RankLostError:
        return 1
    except BaseException:
        log.exception("engine %s failed", options.engine_id)
        return 1
    finally:
        flush_log()


def _lead(context: EngineContext, options: argparse.Namespace) -> int:
    adapter = adapter_named(options.adapter)
    starting = partial(start_rank, adapter=options.adapter, config_path=options.config)
    # The other ranks import while this one does.
    create = launch_ranks(context, adapter.create, options.peer, starting)
    adapter.preload(context.device)
    return run_engine(context, create)


def _follow(context: EngineContext, options: argparse.Namespace) -> int:
    adapter = adapter_named(options.adapter)
    adapter.preload(context.device)
    devices = tuple(options.peer)
    own = EngineContext(context.engine_id, context.device, context.config, rank_devices=devices)
    link = socket.socket(fileno=options.link)
    launch = RankLaunch(own, options.rank, len(devices), link, options.folder)
    run_follower(launch, adapter.create)
    return 0


# --- shared with forked engines --------------------------------------------------------------


def redirect_to_log(path: Path) -> None:
    """Redirects stdin from /dev/null, stdout and stderr to `path`, a file for this user only."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_fd = open_log(path)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(null_fd)
    os.close(log_fd)


def log_to_stderr(name: str) -> None:
    configure_logging(f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")


if __name__ == "__main__":
    sys.exit(main())
