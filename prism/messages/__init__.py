"""Every message that crosses a socket or is stored in Redis, as msgspec tagged structs.

Each module has the messages of one pair of processes. The encoding is MessagePack. New fields get
defaults, so that processes of neighbouring versions can talk. Times named `*_unix_s` are seconds
since the epoch by the cluster's clock; monotonic times never leave a process. Token ids are the
model's own vocabulary ids.

Sockets are ZeroMQ, `ipc://` below the run directory or TCP between machines:
  frontend  binds PULL    <- agents and frontends PUSH `ToFrontend`           requests.py
  agent     binds PULL    <- frontends, launcher and agents of other machines
                             PUSH `ToAgent`                         requests.py, kv.py
  agent     binds ROUTER  <- its engines DEALER (identity = engine id):
                             `ToEngine`, `FromEngine`                         engine.py
  scheduler binds ROUTER  <- agents DEALER (identity = device):
                             `FromAgent`, `FromScheduler`                     agent.py
                          <- operators DEALER (any other identity):
                             `OperatorCommand`, `ActionResult`                cluster.py
  an agent of each machine binds ROUTER  <- agents and engines of other machines DEALER:
                             `FromTaker`, `FromHolder`                weight_exchange.py
An agent and its fork server exchange JSON lines                                 forking.py
"""

from __future__ import annotations

import msgspec

# All machines of a cluster must have the same number. It is raised with each change that an older
# version does not understand, in a message between machines or in Redis.
PROTOCOL = 1
# Raised by decoding: msgspec does not convert the last three for some malformed messages.
MALFORMED_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError)


class Wire(msgspec.Struct, frozen=True, tag=True, array_like=False, omit_defaults=True):
    """Base of all wire messages; the class name is the tag."""
