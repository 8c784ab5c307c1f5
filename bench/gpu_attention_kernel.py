"""Decode attention over paged KV as one Triton kernel that reads blocks in place.

One program for each sequence and KV head iterates over the sequence's blocks with a running
softmax. The kernel is deliberately small, because gpu_attention.py compares layouts, not kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS_MIN = 16  # minimum of tl.dot


@triton.jit
def _decode(  # type: ignore[no-untyped-def]  # noqa: PLR0917 - a kernel has no objects
    query, keys, values, table, out, scale,
    block_stride, token_stride, head_stride,
    BLOCKS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    rows, dims, tokens = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, TOKENS)
    first = (sequence * tl.num_programs(1) + head) * GROUP
    at = (first + rows[:, None]) * DIM + dims[None, :]
    mine = rows[:, None] < GROUP
    q = tl.load(query + at, mask=mine, other=0.0)
    inside = tokens[:, None] * token_stride + head * head_stride + dims[None, :]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    for n in range(BLOCKS):
        block = tl.load(table + sequence * BLOCKS + n).to(tl.int64) * block_stride
        k = tl.load(keys + block + inside)
        scores = tl.dot(q, tl.trans(k)) * scale
        highest = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - highest[:, None])
        kept = tl.exp(top - highest)
        total = total * kept + tl.sum(weights, 1)
        v = tl.load(values + block + inside)
        mixed = mixed * kept[:, None] + tl.dot(weights.to(v.dtype), v)
        top = highest
    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=mine)


def attend_in_place(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """Returns (batch, query heads, head_dim) from a query of that shape, blocks of (blocks, tokens,
    heads, head_dim), and a table of (batch, blocks).

    REQUIRES: dense heads; keys and values of the same strides.
    """
    batch, heads, dim = query.shape
    kv_heads, tokens = keys.shape[2], keys.shape[1]
    group = heads // kv_heads
    out = torch.empty_like(query)
    _decode[(batch, kv_heads)](
        *(query, keys, values, table, out, dim**-0.5),
        *keys.stride()[:3],
        BLOCKS=table.shape[1], GROUP=group, ROWS=max(ROWS_MIN, group), TOKENS=tokens, DIM=dim,
    )  # fmt: skip
    return out
