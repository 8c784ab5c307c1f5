"""Process at either end of a hand-over.

handover_source.py serve NAMESPACE DEVICE BLOCKS: offers blocks, with commands as lines on stdin
handover_source.py fetch NAMESPACE DEVICE ADDRESS BLOCKS: fetches once, and prints the error
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from kvcached import Device, KVCache, errors

from .arrays import as_array
from .conftest import CAPACITY, PAGE, TINY


def content(kv: KVCache, count: int) -> NDArray[np.int64]:
    """Returns the numbers that `fill` writes: one for each block, part and token."""
    shape = (count, len(kv.layout.parts), kv.layout.block_tokens)
    return np.arange(np.prod(shape)).reshape(shape) % 2039


def _views(kv: KVCache) -> list[NDArray[np.float32]]:
    return [as_array(kv.blocks(part.layer, part.name)) for part in kv.layout.parts]


def fill(kv: KVCache, ids: NDArray[np.int64]) -> None:
    numbers = content(kv, len(ids))
    for index, view in enumerate(_views(kv)):
        view[ids] = numbers[:, index, :, None, None]


def wipe(kv: KVCache, ids: NDArray[np.int64]) -> None:
    for view in _views(kv):
        view[ids] = -1


def read(kv: KVCache, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns numbers by (block, part, token). All numbers of a token's part must be the same."""
    columns = []
    for view in _views(kv):
        rows = view[ids]
        assert (rows == rows[:, :, :1, :1]).all()
        columns.append(rows[:, :, 0, 0].astype(np.int64))
    return np.stack(columns, axis=1)


def _open(namespace: str, name: str, role: str) -> KVCache:
    device = Device.open(name, capacity_bytes=CAPACITY, page_bytes=PAGE, namespace=namespace)
    return device.client(role, background=False).alloc_kvcache(TINY, 8000)


def serve(namespace: str, name: str, blocks: int) -> None:
    kv = _open(namespace, name, "source")
    ids = kv.alloc_kv(blocks)
    assert ids is not None
    fill(kv, ids)
    for line in sys.stdin:
        print(_obey(kv, ids, *line.split()), flush=True)


def _obey(kv: KVCache, ids: NDArray[np.int64], command: str, argument: str = "") -> object:
    match command:
        case "offer":
            try:
                return kv.offer_kv(ids, deadline_s=float(argument)).address
            except errors.KvcachedError as error:
                return f"error {type(error).__name__} {error}"
        case "free":
            return kv.free_kv(ids)
        case "reach":
            return kv.can_offer_to(argument)
        case "open":
            return kv.open_offers()
        case _:
            return kv.live_blocks()


def fetch(namespace: str, name: str, address: str, blocks: int) -> None:
    kv = _open(namespace, name, "target")
    ids = kv.alloc_kv(blocks)
    assert ids is not None
    try:
        kv.fetch_kv(address, ids)
    except errors.KvcachedError as error:
        print(f"error {type(error).__name__} {error}")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        fetch(*sys.argv[2:5], int(sys.argv[5]))
