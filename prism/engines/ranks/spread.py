"""Starting the ranks of an engine: forked from it before it does anything else, or started afresh
where it must not fork."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from prism.engines.core import EngineContext, EngineCore
from prism.engines.ranks.follower import Follower
from prism.engines.ranks.group import RankGroup
from prism.engines.ranks.leader import LeaderCore
from prism.errors import RankLostError
from prism.process import die_with_parent, flush_log, show_as

Create = Callable[[EngineContext], EngineCore]

log = logging.getLogger("prism.engine")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank above 0 that is to be started."""

    # Names the rank's own device and engine id.
    context: EngineContext
    rank: int
    size: int
    # Its end of the socket to rank 0.
    link: socket.socket
    # Where the ranks meet.
    folder: Path


StartRank = Callable[[RankPlace], int]


def spread(
    context: EngineContext,
    create: Create,
    peers: Sequence[str],
    start: StartRank | None = None,
) -> Create:
    """`create` for rank 0 of an engine whose other ranks run on the devices `peers` from now on.

    Without peers it is `create` itself. A rank dies with rank 0 and ends when its socket does.
    `start` starts one and returns its pid; by default it is forked, and this process must have one
    thread and no socket of its own yet.
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
        place = RankPlace(own, rank, size, theirs, folder)
        pids.append(start(place) if start else _fork(place, create, links))
        theirs.close()
    group = RankGroup(0, size, links, str(folder))

    def create_leader(own: EngineContext) -> EngineCore:
        leader = dataclasses.replace(own, ranks=group, rank_devices=context.rank_devices)
        return LeaderCore(create(leader), group, pids)

    return create_leader


def rank_name(engine_id: str, rank: int) -> str:
    """Under which a rank above 0 stands in its device's ledger."""
    return f"{engine_id}.{rank}"


def follow(place: RankPlace, create: Create) -> None:
    """The body of a rank above 0: until rank 0 shuts down. Raises what the core raises."""
    group = RankGroup(place.rank, place.size, [place.link], str(place.folder))
    core = create(dataclasses.replace(place.context, ranks=group))
    try:
        Follower(core, group).run()
    except RankLostError as error:
        log.warning("%s ends: %s", place.context.engine_id, error)
        raise
    core.close()


def remove_meetings(run_dir: Path, engine_id: str) -> None:
    """Of engines that have ended, with or without ranks; `engine_id` may be a pattern."""
    for folder in run_dir.glob(f"ranks-{engine_id}"):
        shutil.rmtree(folder, ignore_errors=True)


def _folder(context: EngineContext) -> Path:
    """Where this engine's ranks meet. An id is used again after the death of a fork server."""
    folder = Path(context.config.run_dir) / f"ranks-{context.engine_id}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder


def _fork(place: RankPlace, create: Create, links: Sequence[socket.socket]) -> int:
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        for link in links:
            link.close()
        _be_follower(place, create, parent_pid)
    return pid


def _be_follower(place: RankPlace, create: Create, parent_pid: int) -> NoReturn:
    """Never returns; `os._exit`, as in the fork server's children."""
    status = 1
    try:
        die_with_parent(parent_pid)
        show_as("prism-rank")
        follow(place, create)
        status = 0
    except RankLostError:
        pass
    except BaseException:
        log.exception("%s ends", place.context.engine_id)
    finally:
        flush_log()
        os._exit(status)
