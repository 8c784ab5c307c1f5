"""Arithmetic of a hand-over: the pages that hold a set of blocks, and where their bytes go.

Both ends compute the same list of pages from the source's block ids, so only positions in that list
are sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    import kvcached._core as _core
    from kvcached.layouts import KVLayout

    Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shape:
    """Geometry of a KV cache. Each buffer has `slabs` slabs of `slab_pages` pages."""

    page_bytes: int
    slab_pages: tuple[int, ...]
    blocks_per_slab: int
    slabs: int

    def block_bytes(self, buffer: int) -> int:
        return self.slab_pages[buffer] * self.page_bytes // self.blocks_per_slab

    def first_page(self, buffer: int) -> int:
        """Returns the buffer's first page in the cache's region."""
        return sum(self.slab_pages[:buffer]) * self.slabs

    @property
    def size_bytes(self) -> int:
        return self.first_page(len(self.slab_pages)) * self.page_bytes

    @property
    def buffers(self) -> range:
        return range(len(self.slab_pages))

    def matches(self, other: Shape) -> bool:
        """Returns whether blocks of both hold the same bytes. The number of slabs may differ."""
        mine = (self.page_bytes, self.slab_pages, self.blocks_per_slab)
        return mine == (other.page_bytes, other.slab_pages, other.blocks_per_slab)


@dataclass(frozen=True, slots=True)
class LocalCache:
    """KV cache of this process and its client: the source of an offer, or the target of a fetch."""

    client: _core.Client
    cache: _core.KvCache
    layout: KVLayout
    shape: Shape


@dataclass(frozen=True, slots=True)
class Pieces:
    """Parts of blocks within one page each: columns of equal length."""

    page: Numbers
    """Position in the list of pages."""
    offset: Numbers
    """Offset in the page."""
    target: Numbers
    """Offset in the target's region."""
    size: Numbers
    """Bytes."""


def pages_of(shape: Shape, ids: Numbers) -> Numbers:
    """Returns the pages of the region that hold these blocks, each once, buffer by buffer."""
    import numpy as np

    parts = [_pages_in(shape, buffer, ids) + shape.first_page(buffer) for buffer in shape.buffers]
    return np.concatenate(parts)


def pieces_of(
    source: Shape, source_ids: Numbers, target: Shape, ids: Numbers, skip: int = 0
) -> Pieces:
    """Returns the copies that bring `source_ids`, without the first `skip`, into the blocks `ids`.

    As many as there are `ids`, in their order.
    """
    import numpy as np

    found: list[tuple[Numbers, ...]] = []
    listed = 0
    for buffer in source.buffers:
        pages = _pages_in(source, buffer, source_ids)
        start = target.first_page(buffer) * target.page_bytes
        places = start + ids * target.block_bytes(buffer)
        wanted = source_ids[skip : skip + len(ids)]
        for page, offset, place, size in _cut(source, buffer, wanted, places):
            found.append((listed + np.searchsorted(pages, page), offset, place, size))
        listed += len(pages)
    columns = [np.concatenate(column) for column in zip(*found, strict=True)]
    order = np.lexsort((columns[1], columns[0]))
    return Pieces(*(column[order] for column in columns))


def runs_in(pieces: Pieces, first: int, end: int, page_bytes: int) -> list[tuple[int, int, int]]:
    """Returns (offset in a window over the pages from `first` to `end`, target, bytes).

    Copies that are adjacent at both ends are merged.
    """
    import numpy as np

    low, high = np.searchsorted(pieces.page, [first, end])
    if low == high:
        return []
    source = (pieces.page[low:high] - first) * page_bytes + pieces.offset[low:high]
    target, size = pieces.target[low:high], pieces.size[low:high]
    adjacent = (source[1:] == source[:-1] + size[:-1]) & (target[1:] == target[:-1] + size[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~adjacent)))
    sizes = np.add.reduceat(size, starts)
    columns = (source[starts], target[starts], sizes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _pages_in(shape: Shape, buffer: int, ids: Numbers) -> Numbers:
    import numpy as np

    parts = [page for page, *_ in _cut(shape, buffer, ids, ids)]
    return np.unique(np.concatenate(parts))


def _cut(shape: Shape, buffer: int, ids: Numbers, places: Numbers) -> Iterator[tuple[Numbers, ...]]:
    """Yields the blocks cut at page edges: page of the buffer, offset in it, place, bytes."""
    import numpy as np

    width, page_bytes = shape.block_bytes(buffer), shape.page_bytes
    start = ids * width
    first = start // page_bytes
    for nth in range(-(-width // page_bytes) + 1):
        low = np.maximum(start, (first + nth) * page_bytes)
        high = np.minimum(start + width, (first + nth + 1) * page_bytes)
        some = high > low
        low, high = low[some], high[some]
        yield (low // page_bytes, low % page_bytes, places[some] + low - start[some], high - low)
