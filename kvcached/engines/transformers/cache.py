"""Cache for `generate` of Hugging Face transformers with KV memory mapped on demand."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from kvcached import Client, Heads, HybridLayout, KVCacheGroup, Latent, LayerGroup, NoRoomError
from kvcached.checks import checked, duration, instance_of, positive
from kvcached.engines.transformers import contract
from kvcached.errors import InvalidArgumentError
from kvcached.models import layout_of_config, shape_of_config

Ids = NDArray[np.int64]


class ElasticCache(Cache):  # type: ignore[misc]
    """K and V of one batch of sequences in kvcached blocks; a `DynamicCache` to `generate`.

    Blocks are allocated as the sequences grow and freed by `reset`, or when the cache is dropped.
    Beams share their common blocks. A layer with a sliding window keeps only the blocks of its
    window. The model gets a copy, as from `DynamicCache`, so nothing reads an unmapped page. Used
    from the client's thread, for inference alone.

    `num_tokens` limits all sequences together and is address space, so it may exceed the device.
    `dtype` is the type of K and V (None: the model's own). When the device does not have
    room, the model's step raises NoRoomError, at once or after `wait_s` in which other clients are
    asked to shrink, and the cache is as it was before that step.
    """

    @checked(
        client=instance_of(Client),
        config=instance_of(PreTrainedConfig),
        num_tokens=positive,
        block_tokens=positive,
        wait_s=duration,
    )
    def __init__(
        self,
        client: Client,
        config: PreTrainedConfig,
        num_tokens: int,
        *,
        dtype: str | None = None,
        block_tokens: int = 16,
        wait_s: float = 0.0,
    ) -> None:
        contract.check(contract.CACHE)
        layout = _layout(config, dtype, block_tokens)
        self.client = client
        self.kv: KVCacheGroup = client.alloc_kvcache(layout, num_tokens, reserved_blocks=0)
        self._drop = weakref.finalize(self, _free, client, self.kv)
        self._wait_s = wait_s
        self._tables = {group.name: _BlockTable(group) for group in layout.groups}
        layers = {n: group.name for group in layout.groups for n in group.layers}
        super().__init__(layers=[_Layer(self, n, layers[n]) for n in sorted(layers)])
        device = self.layers[0].view["k"].device
        if device.type == "cuda":
            client.set_streams([torch.cuda.current_stream(device).cuda_stream])

    def grow(self, rows: int, to_tokens: int) -> None:
        """Allocates blocks for `rows` sequences of `to_tokens`, in every group of layers or in
        none.

        Raises NoRoomError, InvalidArgumentError if the cache holds another number of sequences.
        """
        wanted = {}
        for name, table in self._tables.items():
            self._free_blocks(name, table.drop_outside_window())
            wanted[name] = table.missing(rows, to_tokens)
        ids = self.kv.alloc_kv(wanted, wait_s=self._wait_s)
        if ids is None:
            raise self._no_room(rows, to_tokens, wanted)
        for name, table in self._tables.items():
            self._copy_blocks(name, *table.take(rows, to_tokens, ids[name]))

    def reset(self) -> None:
        """Frees every block. The cache can be used again, also for other sequences."""
        for name, table in self._tables.items():
            self._free_blocks(name, table.clear())
        for layer in self.layers:
            layer.length = 0
        self.kv.trim()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continues sequence i from sequence `beam_idx[i]`, whose blocks it shares."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these sequences, in this order. One may be named several times."""
        for name, table in self._tables.items():
            self._free_blocks(name, table.select(indices.cpu().numpy()))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each sequence `repeats` times."""
        rows = next(iter(self._tables.values())).rows
        self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last tokens: -n drops n tokens, a positive number is the length to keep.

        Same as in `DynamicCache`. Raises InvalidArgumentError for tokens that need tokens which a
        sliding window has dropped.
        """
        length = self.get_seq_length()
        kept = length + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        if kept >= length:
            return
        for name, table in self._tables.items():
            self._free_blocks(name, table.crop(max(kept, 0)))
        for layer in self.layers:
            layer.length = max(kept, 0)

    def mapped_bytes(self) -> int:
        """Returns the bytes of the cache's pages."""
        return self.kv.mapped_bytes()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise InvalidArgumentError("an ElasticCache cannot be copied; fill a new one")

    def __reduce__(self) -> NoReturn:
        raise InvalidArgumentError(
            "an ElasticCache cannot be pickled; fill one in the other process"
        )

    def _free_blocks(self, name: str, ids: Ids) -> None:
        if len(ids):
            self.kv.free_kv({name: ids})

    def _copy_blocks(self, name: str, source: Ids, copy: Ids) -> None:
        views = [layer.view for layer in self.layers if layer.group == name]
        for view in (view for parts in views for view in parts.values() if len(copy)):
            view[torch.from_numpy(copy)] = view[torch.from_numpy(source)]

    def _no_room(self, rows: int, to_tokens: int, wanted: dict[str, int]) -> NoRoomError:
        pages = [self.kv[name].missing_pages(count) for name, count in wanted.items()]
        if None in pages:
            return NoRoomError(
                f"{rows} sequences of {to_tokens} tokens exceed this cache's addresses; make it "
                "with a larger num_tokens"
            )
        need_bytes = sum(page or 0 for page in pages) * self.client.page_bytes
        return NoRoomError(
            f"{rows} sequences of {to_tokens} tokens need {need_bytes} bytes more than the device "
            "has for this client now; generate less at a time, raise its limit, or set the cache's "
            "wait_s, in which other clients are asked to shrink",
            need_bytes,
        )


class _BlockTable:
    """Blocks of the sequences of a batch, in layers that free their blocks together.

    Row r, column c is the block with r's tokens from (dropped + c) * block_tokens on. Rows with a
    common beginning share its blocks, and a block that two rows share is never written. A block
    that no row uses is free.
    """

    def __init__(self, group: LayerGroup) -> None:
        self._group = group
        self._block_tokens = group.layout.block_tokens
        self.clear()

    def clear(self) -> Ids:
        """Drops all blocks. Like all methods that return ids: those that no row uses any more."""
        freed = np.unique(self.ids) if hasattr(self, "ids") else np.empty(0, np.int64)
        self.ids: Ids = np.empty((0, 0), np.int64)
        self.length = 0
        self.dropped = 0
        self._on_device: torch.Tensor | None = None
        return freed

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return len(self.ids)

    @property
    def first_token(self) -> int:
        """First token that is kept. The sliding window has dropped the tokens before it."""
        return self.dropped * self._block_tokens

    def missing(self, rows: int, to_tokens: int) -> int:
        """Returns the blocks to allocate before every row can be written up to `to_tokens`."""
        if self.length and rows != self.rows:
            raise InvalidArgumentError(
                f"the cache holds {self.rows} sequences, but the model was given {rows}; call "
                "reset() between batches"
            )
        return rows * self._more_columns(to_tokens) + len(self._shared_ends())

    def take(self, rows: int, to_tokens: int, fresh: Ids) -> tuple[Ids, Ids]:
        """Adds the blocks that `missing` counted.

        Returns the blocks to copy, and the new blocks to copy them to.
        """
        shared, columns = self._shared_ends(), self._more_columns(to_tokens)
        copies, added = fresh[: len(shared)], fresh[len(shared) :]
        held = self.ids if self.length else np.empty((rows, 0), np.int64)
        sources = held[shared, -1:].reshape(-1)
        held[shared, -1:] = copies.reshape(-1, 1)
        self.ids = np.concatenate((held, added.reshape(rows, columns)), axis=1)
        self.length, self._on_device = to_tokens, None
        return sources, copies

    def drop_outside_window(self) -> Ids:
        """Drops the blocks that no later token attends to."""
        dead = self._group.dead_blocks(self.length) - self.dropped
        if dead <= 0:
            return np.empty(0, np.int64)
        self.dropped += dead
        return self._replace(self.ids[:, dead:])

    def select(self, rows: NDArray[Any]) -> Ids:
        """Makes these rows the batch."""
        return self._replace(self.ids[rows] if self.length else self.ids)

    def crop(self, length: int) -> Ids:
        """Drops the tokens from `length` on."""
        window = self._group.window_tokens
        if window is not None and max(0, length - window + 1) < self.first_token:
            raise InvalidArgumentError(
                f"{length} tokens cannot be kept: the sliding window has dropped tokens that they "
                f"attend to, up to token {self.first_token}; reset() and compute them again"
            )
        self.length = length
        columns = -(-length // self._block_tokens) - self.dropped
        return self._replace(self.ids[:, :columns])

    def slots(self, start: int, end: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Returns the positions of every row's tokens from `start` to `end`: (blocks, offsets in
        them).

        They index a view by blocks to (rows, tokens).
        """
        tokens = torch.arange(start, end, device=device)
        columns = tokens // self._block_tokens - self.dropped
        return self.on(device)[:, columns], tokens % self._block_tokens

    def on(self, device: torch.device) -> torch.Tensor:
        """Returns the table on a device, (rows, columns)."""
        if self._on_device is None:
            self._on_device = torch.from_numpy(self.ids).to(device)
        return self._on_device

    def _more_columns(self, to_tokens: int) -> int:
        return -(-to_tokens // self._block_tokens) - self.dropped - int(self.ids.shape[1])

    def _shared_ends(self) -> Ids:
        """Returns the rows that are about to write to a block which an earlier row shares."""
        if self.length % self._block_tokens == 0:
            return np.empty(0, np.int64)
        _, owners = np.unique(self.ids[:, -1], return_index=True)
        return np.setdiff1d(np.arange(self.rows), owners)

    def _replace(self, ids: Ids) -> Ids:
        freed = np.setdiff1d(self.ids, ids)
        self.ids, self._on_device = ids.copy(), None
        return freed


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer as the model and its masks see it."""

    is_croppable = True

    def __init__(self, cache: ElasticCache, number: int, group: str) -> None:
        # Does not call the base's __init__: `keys` and `values` are computed here. The reference is
        # weak, since a dropped cache would otherwise keep its pages until garbage collection.
        self._cache = weakref.ref(cache)
        self.group = group
        self.length = 0
        self.is_initialized = True
        self.view = {part: torch.from_dlpack(cache.kv.blocks(number, part)) for part in "kv"}
        self._table = cache._tables[group]
        self._window: int | None = self._table._group.window_tokens
        self.is_sliding = self._window is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: addresses exist from the start, and pages come with tokens."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds K and V of new tokens, (rows, heads, tokens, dim).

        Returns the K and V that the tokens attend to, oldest first.
        """
        states = {"k": key_states, "v": value_states}
        for part, new in states.items():
            self._check(part, new)
        start, end = self.length, self.length + key_states.shape[2]
        if end > self._table.length:  # the first layer of this step
            self._owner().grow(key_states.shape[0], end)
        where = self._table.slots(start, end, key_states.device)
        for part, new in states.items():
            self.view[part][where] = new.transpose(1, 2)
        self.length = end
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Returns the tokens of each sequence."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of tokens that `update` will return for `query_length` new ones.

        The second value is the number of the first of them.
        """
        group = self._table._group
        dropped = max(self._table.dropped, group.dead_blocks(self.length))
        first = dropped * group.layout.block_tokens
        return self.length + query_length - first, first

    def get_max_length(self) -> int:
        """Returns the window, or -1 if the length is unlimited."""
        return -1 if self._window is None else self._window

    @property
    def keys(self) -> torch.Tensor:
        """A copy of K of all kept tokens: (rows, heads, tokens, dim)."""
        return self._held("k")

    @property
    def values(self) -> torch.Tensor:
        """A copy of V of all kept tokens: (rows, heads, tokens, dim)."""
        return self._held("v")

    def _held(self, part: str) -> torch.Tensor:
        view = self.view[part]
        table = self._table.on(view.device)
        blocks = view.index_select(0, table.flatten()).unflatten(0, table.shape)
        held = blocks.flatten(1, 2)  # (rows, tokens, heads, dim)
        return held[:, : self.length - self._table.first_token].transpose(1, 2)

    def _owner(self) -> ElasticCache:
        cache = self._cache()
        if cache is None:
            raise InvalidArgumentError("the cache of this layer was dropped")
        return cache

    def _check(self, part: str, new: torch.Tensor) -> None:
        view = self.view[part]
        if new.dtype != view.dtype:
            asked = str(new.dtype).removeprefix("torch.")
            raise InvalidArgumentError(
                f"the model computes {part.upper()} in {new.dtype}, but the cache holds "
                f"{view.dtype}; make it with dtype={asked!r}"
            )
        if new.device != view.device:
            raise InvalidArgumentError(
                f"the model is on {new.device}, but the cache's device is {view.device}; open the "
                "device that the model is on"
            )
        if (new.shape[1], new.shape[3]) != view.shape[2:]:
            raise InvalidArgumentError(
                f"the model's {part.upper()} has {new.shape[1]} heads of {new.shape[3]}, but the "
                f"cache has {view.shape[2]} of {view.shape[3]}; make it from this model's config"
            )
        if new.requires_grad:
            raise InvalidArgumentError("an ElasticCache is for inference; use torch.no_grad()")


def _layout(config: PreTrainedConfig, dtype: str | None, block_tokens: int) -> HybridLayout:
    """Returns the groups of layers of a model's configuration, at least one."""
    model = config.get_text_config(decoder=True).to_dict()
    for layer in shape_of_config(model).layers:
        if layer.state is not None or not isinstance(layer.kv, Heads):
            kept = "latent attention" if isinstance(layer.kv, Latent) else "layers without K and V"
            raise InvalidArgumentError(
                f"{model.get('model_type')} has {kept}, which an ElasticCache does not keep; use "
                "transformers' DynamicCache"
            )
    layout = layout_of_config(model, dtype, block_tokens)
    if isinstance(layout, HybridLayout):
        return layout
    layers = tuple(range(layout.layer_count))
    return HybridLayout((LayerGroup("full", layers, layout),))


def _free(client: Client, kv: KVCacheGroup) -> None:
    client.free_kvcache(kv)
