"""Cost of a layout's arrangement for the attention of a decode step, in torch.

    python bench/kv_layout.py [--device host:0] [--layers 8] [--kv-heads 8] [--batch 4]
        [--context 512] [--dtype float32] [--pairs 9]

A step writes one new token of each sequence into every layer and attends to its whole context. The
context is gathered through a block table with blocks in random order: by tokens, as SGLang's
torch-native backend does (`k[token_ids]`), or by blocks (`k[block_ids]`). Each pair has the same
step on the per-layer layout. No page is mapped in between, so only the strides differ. `--device
cuda:0` runs it on a GPU (a CUDA build of torch), with wall-clock times and an idle GPU at both
ends.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from devices import bench_device
from pairs import measure
from torch.nn.functional import scaled_dot_product_attention

from kvcached import Client, KVCache, Layout
from kvcached.layouts import Arrangement

PAGE_BYTES = 2 << 20
BLOCK_TOKENS = 16
COMPARED: tuple[tuple[Arrangement, str], ...] = (
    ("block_interleaved", "blocks"),
    ("token_interleaved", "blocks"),
    ("token_interleaved", "tokens"),
)


@dataclass(frozen=True)
class Inputs:
    """Common inputs of both sides of a pair: block ids (batch, blocks), and rows of a new token."""

    blocks: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor

    @property
    def tokens(self) -> torch.Tensor:
        """Returns the row of each token: (batch, context)."""
        offsets = torch.arange(BLOCK_TOKENS, device=self.blocks.device)
        return (self.blocks[..., None] * BLOCK_TOKENS + offsets).flatten(1)


def torch_device(name: str) -> torch.device:
    if name.startswith("host"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit(f"{name}: this torch does not have CUDA; use --device host:0")
    return torch.device(name)


def attend(inputs: Inputs, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns the attention of one query token to (batch, context, kv_heads, head_dim)."""
    keys, values = (x.transpose(1, 2) for x in (keys, values))
    return scaled_dot_product_attention(inputs.query, keys, values, enable_gqa=True)


def step_by_tokens(kv: KVCache, inputs: Inputs) -> Callable[[], None]:
    layers = range(kv.layout.layer_count)
    pairs = [[torch.from_dlpack(kv.buffer(i, part)) for part in ("k", "v")] for i in layers]
    rows = inputs.tokens

    def step() -> None:
        for keys, values in pairs:
            keys[rows[:, -1]] = inputs.key
            values[rows[:, -1]] = inputs.key
            attend(inputs, keys[rows], values[rows])

    return step


def step_by_blocks(kv: KVCache, inputs: Inputs) -> Callable[[], None]:
    layers = range(kv.layout.layer_count)
    pairs = [[torch.from_dlpack(kv.blocks(i, part)) for part in ("k", "v")] for i in layers]
    table = inputs.blocks

    def step() -> None:
        for keys, values in pairs:
            keys[table[:, -1], -1] = inputs.key
            values[table[:, -1], -1] = inputs.key
            attend(inputs, keys[table].flatten(1, 2), values[table].flatten(1, 2))

    return step


STEPS = {"tokens": step_by_tokens, "blocks": step_by_blocks}


def make_inputs(options: argparse.Namespace, ids: np.ndarray) -> Inputs:
    where = torch_device(options.device)
    shuffled = np.random.default_rng(1).permutation(ids).reshape(options.batch, -1)
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(1)
    heads = options.kv_heads * options.group
    return Inputs(
        torch.from_numpy(shuffled).to(where),
        torch.randn(options.batch, heads, 1, options.head_dim, dtype=dtype, device=where),
        torch.randn(options.batch, options.kv_heads, options.head_dim, dtype=dtype, device=where),
    )


def filled(client: Client, layout: Layout, options: argparse.Namespace) -> tuple[KVCache, Inputs]:
    """Returns a cache that holds the whole batch, with every element written."""
    blocks = options.batch * -(-options.context // BLOCK_TOKENS)
    tokens = (blocks + 1) * BLOCK_TOKENS
    kv = client.alloc_kvcache(layout, tokens, reserved_blocks=0)
    ids = kv.alloc_kv(blocks)
    if ids is None:
        raise SystemExit("the device is too small for this batch; lower --batch or --context")
    held = torch.from_numpy(ids).to(torch_device(options.device))
    for part in layout.parts:
        torch.from_dlpack(kv.blocks(part.layer, part.name))[held] = 0.5
    return kv, make_inputs(options, ids)


def synchronised(step: Callable[[], None], options: argparse.Namespace) -> Callable[[], None]:
    if torch_device(options.device).type == "cpu":
        return step

    def until_done() -> None:
        step()
        torch.cuda.synchronize()

    return until_done


def report(client: Client, options: argparse.Namespace) -> None:
    stock = Layout(
        options.layers,
        options.kv_heads,
        options.head_dim,
        dtype=options.dtype,
        block_tokens=BLOCK_TOKENS,
    )
    on_gpu = torch_device(options.device).type == "cuda"
    clock = time.perf_counter if on_gpu else time.thread_time
    for arrangement, access in COMPARED:
        steps = []
        caches = []
        for layout in (replace(stock, arrangement=arrangement), stock):
            kv, inputs = filled(client, layout, options)
            caches.append(kv)
            steps.append(synchronised(STEPS[access](kv, inputs), options))
        pairs = measure(steps[0], steps[1], options.pairs, clock)
        print(pairs.line(f"{arrangement}, by {access}", "per layer is 1", "ms a step", 1e-3, 1e-3))
        for kv in caches:
            client.free_kvcache(kv)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="host:0")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4, help="query heads of each KV head")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pairs", type=int, default=9, help="timings of each")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    torch_device(options.device)
    tokens = options.batch * (options.context + BLOCK_TOKENS)
    row_bytes = 2 * options.layers * options.kv_heads * options.head_dim * 4
    capacity = 3 * tokens * row_bytes + 8 * 2 * options.layers * PAGE_BYTES
    with (
        bench_device(PAGE_BYTES, options.device, capacity) as device,
        device.client("bench") as client,
        torch.inference_mode(),
    ):
        report(client, options)


if __name__ == "__main__":
    main()
