"""Start of an engine's ranks above 0: forked before the engine does anything else, or as fresh
processes if it must not fork."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prism.engines.core import EngineContext, EngineCore
from prism.engines.processes.rank_follower import Follower
from prism.engines.processes.rank_leader import LeaderCore
from prism.engines.ranks.group import RankGroup
from prism.errors import RankLostError
from prism.process import fork_child

Create = Callable[[EngineContext], EngineCore]

log = logging.getLogger("prism.engine")


@dataclass(frozen=True, slots=True)
class RankLaunch:
    """Parameters of a rank above 0 that is to be started."""

    # Has the rank's own device and engine id.
    context: EngineContext
    rank: int
    size: int
    # This rank's end of the socket to rank 0.
    link: socket.socket
    # Folder of the ranks' rendezvous files.
    folder: Path


StartRank = Callable[[RankLaunch], int]


def launch_ranks(
    context: EngineContext,
    create: Create,
    peers: Sequence[str],
    start: StartRank | None = None,
) -> Create:
    """Starts the ranks above 0. Returns `create` for rank 0.

    Without peers it returns `create` itself. A rank dies with rank 0, and ends when its socket is
    closed.

    Args:
        peers: devices of ranks 1, 2, ...
        start: starts a rank and returns its pid. By default the rank is forked; this process must
            then have one thread and no sockets yet.
    """
    if not peers:
        return create
    size, folder = 1 + len(peers), _folder(context)
    context = dataclasses.replace(context, rank_devices=(context.device, *peers))
    links: list[socket.socket] = []
    pids: list[int] = []
    for rank, device in enumerate(peers, 1):
        ours, theirs = socket.socketpair()
        links.append(ours)
        name = rank_name(context.engine_id, rank)
        own = dataclasses.replace(context, engine_id=name, device=device)
        launch = RankLaunch(own, rank, size, theirs, folder)
        pids.append(start(launch) if start else _fork(launch, create, links))
        theirs.close()
    group = RankGroup(0, size, links, str(folder))

    def create_leader(own: EngineContext) -> EngineCore:
        leader = dataclasses.replace(own, ranks=group, rank_devices=context.rank_devices)
        return LeaderCore(create(leader), group, pids)

    return create_leader


def rank_name(engine_id: str, rank: int) -> str:
    """Returns the name of a rank above 0 in its device's ledger."""
    return f"{engine_id}.{rank}"


def run_follower(launch: RankLaunch, create: Create) -> None:
    """Runs a rank above 0 until rank 0 shuts down. Raises the core's errors."""
    group = RankGroup(launch.rank, launch.size, [launch.link], str(launch.folder))
    core = create(dataclasses.replace(launch.context, ranks=group))
    try:
        Follower(core, group).run()
    except RankLostError as error:
        log.warning("%s ends: %s", launch.context.engine_id, error)
        raise
    core.close()


def remove_rendezvous(run_dir: Path, engine_id: str) -> None:
    """Removes the rendezvous folders of engines that have ended; `engine_id` may be a pattern."""
    for folder in run_dir.glob(f"ranks-{engine_id}"):
        shutil.rmtree(folder, ignore_errors=True)


def _folder(context: EngineContext) -> Path:
    """Creates the folder of the ranks' rendezvous files. The folder of an earlier engine with the
    same id is removed: ids are reused after the death of a fork server."""
    folder = Path(context.config.run_dir) / f"ranks-{context.engine_id}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder


def _fork(launch: RankLaunch, create: Create, links: Sequence[socket.socket]) -> int:
    def run() -> int:
        for link in links:
            link.close()
        try:
            run_follower(launch, create)
        except RankLostError:  # logged by run_follower
            return 1
        return 0

    return fork_child("prism-rank", run, log, launch.context.engine_id)
