"""Which pages hold a set of blocks, and which bytes of them go where: arithmetic alone.

Both ends of a hand-over compute the same list of pages from the source's block ids, so that only
positions in it are ever sent.
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
    """A KV cache as far as it matters here, all by buffer: pages of a slab; `slabs` of each."""

    page_bytes: int
    slab_pages: tuple[int, ...]
    blocks_per_slab: int
    slabs: int

    def block_bytes(self, buffer: int) -> int:
        return self.slab_pages[buffer] * self.page_bytes // self.blocks_per_slab

    def first_page(self, buffer: int) -> int:
        """Of the buffer, in the cache's region."""
        return sum(self.slab_pages[:buffer]) * self.slabs

    @property
    def size_bytes(self) -> int:
        return self.first_page(len(self.slab_pages)) * self.page_bytes

    @property
    def buffers(self) -> range:
        return range(len(self.slab_pages))

    def matches(self, other: Shape) -> bool:
        """Whether blocks of the two hold the same bytes: any number of slabs will do."""
        mine = (self.page_bytes, self.slab_pages, self.blocks_per_slab)
        return mine == (other.page_bytes, other.slab_pages, other.blocks_per_slab)


@dataclass(frozen=True, slots=True)
class LocalCache:
    """A KV cache of this process, and its client: what is offered from, or fetched into."""

    client: _core.Client
    cache: _core.KvCache
    layout: KVLayout
    shape: Shape


@dataclass(frozen=True, slots=True)
class Pieces:
    """Parts of blocks that lie on one page each: a page of the list, from where on in it, to where
    in the target's region, how many bytes."""

    page: Numbers
    offset: Numbers
    target: Numbers
    size: Numbers


def pages_of(shape: Shape, ids: Numbers) -> Numbers:
    """The pages of the region that hold these blocks, each once, buffer by buffer."""
    import numpy as np

    parts = [_pages_in(shape, buffer, ids) + shape.first_page(buffer) for buffer in shape.buffers]
    return np.concatenate(parts)


def pieces_of(
    source: Shape, source_ids: Numbers, target: Shape, ids: Numbers, skip: int = 0
) -> Pieces:
    """How the blocks `source_ids`, but for the first `skip`, come into the blocks `ids`, as many as
    there are of these, in their order."""
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
    """(offset in a window over the pages from `first` up to `end`, target, bytes), those that
    follow one another at both ends as one."""
    import numpy as np

    low, high = np.searchsorted(pieces.page, [first, end])
    if low == high:
        return []
    source = (pieces.page[low:high] - first) * page_bytes + pieces.offset[low:high]
    target, size = pieces.target[low:high], pieces.size[low:high]
    goes_on = (source[1:] == source[:-1] + size[:-1]) & (target[1:] == target[:-1] + size[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    sizes = np.add.reduceat(size, starts)
    columns = (source[starts], target[starts], sizes)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _pages_in(shape: Shape, buffer: int, ids: Numbers) -> Numbers:
    import numpy as np

    parts = [page for page, *_ in _cut(shape, buffer, ids, ids)]
    return np.unique(np.concatenate(parts))


def _cut(shape: Shape, buffer: int, ids: Numbers, places: Numbers) -> Iterator[tuple[Numbers, ...]]:
    """The blocks cut at the edges of pages: page of the buffer, offset in it, place, bytes."""
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
