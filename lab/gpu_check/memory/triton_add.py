"""Smallest Triton kernel, which shows whether kernels can be compiled and run."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _add_one(source, target, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    tl.store(target + at, tl.load(source + at, mask=mask) + 1, mask=mask)


def add_one(source: Any) -> Any:
    target = torch.empty_like(source)
    _add_one[(triton.cdiv(source.numel(), BLOCK),)](source, target, source.numel(), BLOCK=BLOCK)
    return target
