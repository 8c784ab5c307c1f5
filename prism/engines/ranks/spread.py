"""Starting the ranks of an engine: forked from it before it does anything else."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from prism.engines.core import EngineContext, EngineCore
from prism.engines.ranks.follower import Follower
from prism.engines.ranks.group import RankGroup
from prism.engines.ranks.leader import LeaderCore
from prism.errors import RankLostError
from prism.process import die_with_parent

Create = Callable[[EngineContext], EngineCore]

log = logging.getLogger("prism.engine")


def spread(context: EngineContext, create: Create, peers: Sequence[str]) -> Create:
    """`create` for rank 0 of an engine whose other ranks run on the devices `peers` from now on.

    Without peers it is `create` itself. A rank dies with rank 0 and ends when its socket does.
    REQUIRES: this process has one thread and no socket of its own yet.
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
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            for link in links:
                link.close()
            group = RankGroup(rank, size, [theirs], str(folder))
            name = rank_name(context.engine_id, rank)
            own = dataclasses.replace(context, engine_id=name, device=device, ranks=group)
            _be_follower(own, create, parent_pid)
        theirs.close()
        pids.append(pid)
    group = RankGroup(0, size, links, str(folder))

    def create_leader(own: EngineContext) -> EngineCore:
        leader = dataclasses.replace(own, ranks=group, rank_devices=context.rank_devices)
        return LeaderCore(create(leader), group, pids)

    return create_leader


def rank_name(engine_id: str, rank: int) -> str:
    """Under which a rank above 0 stands in its device's ledger."""
    return f"{engine_id}.{rank}"


def _folder(context: EngineContext) -> Path:
    """Where this engine's ranks meet. Engine ids are not used twice in a run directory, but one
    that a killed predecessor of the agent left behind is."""
    folder = Path(context.config.run_dir) / f"ranks-{context.engine_id}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    return folder


def _be_follower(context: EngineContext, create: Create, parent_pid: int) -> NoReturn:
    """Never returns; `os._exit`, as in the nursery's children."""
    status = 1
    try:
        die_with_parent(parent_pid)
        core = create(context)
        Follower(core, context.ranks).run()
        core.close()
        status = 0
    except RankLostError as error:
        log.warning("%s ends: %s", context.engine_id, error)
    except BaseException:
        log.exception("%s ends", context.engine_id)
    finally:
        sys.stderr.flush()
        os._exit(status)
