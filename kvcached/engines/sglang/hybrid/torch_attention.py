"""SGLang's attention in plain torch, for a CPU, with windows in a separate pool and with sinks.

SGLang's class writes to that pool, but reads it by the tokens' slots in the other one.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn import functional


class TorchAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """SGLang's attention, except for models with a pool of windows or with attention sinks."""

    _sinks: torch.Tensor | None = None  # of the layer, (heads,)

    def forward_extend(self, *args: Any, sinks: Any = None, **kwargs: Any) -> Any:
        self._sinks = sinks
        return super().forward_extend(*args, **kwargs)

    def forward_decode(self, *args: Any, sinks: Any = None, **kwargs: Any) -> Any:
        self._sinks = sinks
        return super().forward_decode(*args, **kwargs)

    def _run_sdpa_forward_extend(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_plain:
            return super()._run_sdpa_forward_extend(*args, **kwargs)
        *shared, _, new_lens, _ = args
        return self._attend(tuple(shared), new_lens, **kwargs)

    def _run_sdpa_forward_decode(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_plain:
            return super()._run_sdpa_forward_decode(*args, **kwargs)
        *shared, _ = args
        return self._attend(tuple(shared), torch.ones_like(shared[-1]), **kwargs)

    @property
    def _is_plain(self) -> bool:
        return self._sinks is None and not self.use_sliding_window_kv_pool

    def _attend(
        self,
        shared: tuple[torch.Tensor, ...],
        new_lens: torch.Tensor,
        *,
        scaling: float,
        sliding_window_size: int | None,
        **_: Any,
    ) -> torch.Tensor:
        """Returns the attention of each sequence's new tokens (tokens, heads, dim).

        Args:
            shared: the first arguments of SGLang's functions, in order.
        """
        query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens = shared
        end = 0
        rows = zip(req_pool_indices, seq_lens.tolist(), new_lens.tolist(), strict=True)
        for row, length, new in rows:
            first = 0
            if sliding_window_size is not None:
                first = max(0, length - new - sliding_window_size)
            slots = req_to_token[row, first:length].long()
            if sliding_window_size is not None and self.use_sliding_window_kv_pool:
                slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
            queries = query[end : end + new]
            mask = _mask(length - new, new, first, length, sliding_window_size).to(query.device)
            output[end : end + new] = self._sdpa(
                queries, k_cache[slots], v_cache[slots], mask, scaling
            )
            end += new
        return output

    def _sdpa(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Returns attention (tokens, heads, dim). A sink is a key with its own logit and without a
        value."""
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(
            ~mask, float("-inf")
        )
        if self._sinks is not None:
            k, v = (functional.pad(each, (0, 0, 0, 0, 0, 1)) for each in (k, v))
            sinks = self._sinks.to(q.dtype)[:, None, None].expand(-1, len(q), 1)
            bias = torch.cat([bias.expand(len(sinks), -1, -1), sinks], dim=2)
        q, k, v = (each.to(q.dtype).transpose(0, 1)[None] for each in (q, k, v))
        found = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        return found[0].transpose(0, 1)


def _mask(start: int, count: int, first: int, end: int, window_tokens: int | None) -> torch.Tensor:
    """Returns which of the tokens from `first` to `end` each of `count` tokens from `start` on
    attends to: itself and those before it, `window_tokens` at most."""
    ahead = torch.arange(start, start + count)[:, None] - torch.arange(first, end)
    mask = ahead >= 0
    return mask if window_tokens is None else mask & (ahead <= window_tokens)
