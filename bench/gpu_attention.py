"""Attention of a decode step over both layouts of KV blocks on a GPU: per layer, block-interleaved.

    python bench/gpu_attention.py [--device cuda:0] [--layers 16] [--kv-heads 8] [--group 4]
        [--batch 64] [--context 2048] [--dtype bfloat16] [--pairs 9] [--kernel auto]

In every layer a step attends with one query token of each sequence to its whole context, whose
blocks are in random order. Each pair has the same step on the per-layer layout, so only the strides
differ. `--kernel triton` reads the blocks in place (gpu_attention_kernel.py), as engines' kernels
do. `torch` gathers them first and calls scaled_dot_product_attention. `auto` is Triton if it can be
imported. Times are wall-clock times, with an idle GPU at both ends. The results of both layouts are
compared. Figures of a GPU belong in docs/gpu-results.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

import numpy as np
import torch
from devices import bench_device
from pairs import measure
from torch.nn.functional import scaled_dot_product_attention

from kvcached import Client, KVCache, Layout

PAGE_BYTES = 2 << 20
BLOCK_TOKENS = 16
GB = 10**9

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """Filled cache of one layout, and the inputs of a step."""

    kv: KVCache
    views: list[tuple[torch.Tensor, torch.Tensor]]
    table: torch.Tensor  # (batch, blocks): blocks of each sequence
    query: torch.Tensor  # (batch, query heads, head_dim)

    def step(self, attend: Attend) -> torch.Tensor:
        """Returns the last layer's result, in (batch, query heads, head_dim)."""
        out = self.query
        for keys, values in self.views:
            out = attend(self.query, keys, values, self.table)
        return out


def attend_gathered(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """Returns torch's own attention, over blocks that are copied together first."""
    k, v = (x[table].flatten(1, 2).transpose(1, 2) for x in (keys, values))
    return scaled_dot_product_attention(query.unsqueeze(2), k, v, enable_gqa=True).squeeze(2)


def chosen_kernel(name: str) -> tuple[str, Attend]:
    if name == "auto":
        name = "triton" if find_spec("triton") is not None else "torch"
    if name == "torch":
        return name, attend_gathered
    from gpu_attention_kernel import attend_in_place

    return name, attend_in_place


def fill(view: torch.Tensor, ids: torch.Tensor, seed: int) -> None:
    """Writes values that are equal for all layouts, a few blocks at a time to save memory."""
    generator = torch.Generator(device=view.device).manual_seed(seed)
    for some in ids.split(1024):
        shape = (len(some), *view.shape[1:])
        values = torch.randn(shape, generator=generator, device=view.device)
        view[some] = values.to(view.dtype)


def subject(client: Client, layout: Layout, options: argparse.Namespace) -> Subject:
    blocks = options.batch * (options.context // BLOCK_TOKENS)
    kv = client.alloc_kvcache(layout, (blocks + 1) * BLOCK_TOKENS, reserved_blocks=0)
    kv.set_premapped_pages(0, 0)
    ids = kv.alloc_kv(blocks)
    if ids is None:
        raise SystemExit("the device is too small for this batch; lower --batch or --context")
    held = torch.from_numpy(ids.copy()).to(options.device)
    views = [
        (torch.from_dlpack(kv.k_blocks(n)), torch.from_dlpack(kv.v_blocks(n)))
        for n in range(options.layers)
    ]
    for number, (keys, values) in enumerate(views):
        fill(keys, held, 2 * number)
        fill(values, held, 2 * number + 1)
    order = np.random.default_rng(1).permutation(ids).reshape(options.batch, -1)
    generator = torch.Generator(device=options.device).manual_seed(1)
    heads = options.kv_heads * options.group
    shape = (options.batch, heads, options.head_dim)
    query = torch.randn(shape, generator=generator, device=options.device).to(views[0][0].dtype)
    return Subject(kv, views, torch.from_numpy(order.copy()).to(options.device), query)


def until_done(step: Callable[[], torch.Tensor]) -> Callable[[], None]:
    def call() -> None:
        step()
        torch.cuda.synchronize()

    return call


def check_equal(first: torch.Tensor, second: torch.Tensor, what: str) -> None:
    """Raises SystemExit if the results of the layouts differ."""
    difference = float((first.float() - second.float()).abs().amax().cpu())
    if not difference <= 0.02:
        raise SystemExit(f"{what} differ by {difference}")


def report(client: Client, options: argparse.Namespace) -> None:
    stock = Layout(
        options.layers,
        options.kv_heads,
        options.head_dim,
        dtype=options.dtype,
        block_tokens=BLOCK_TOKENS,
    )
    name, attend = chosen_kernel(options.kernel)
    interleaved = subject(client, replace(stock, arrangement="block_interleaved"), options)
    per_layer = subject(client, stock, options)
    results = [each.step(attend) for each in (interleaved, per_layer)]
    check_equal(*results, "the layouts' results")
    check_equal(results[1], per_layer.step(attend_gathered), f"{name} and torch")
    steps = [until_done(lambda s=s: s.step(attend)) for s in (interleaved, per_layer)]
    pairs = measure(steps[0], steps[1], options.pairs, time.perf_counter)
    element_bytes = per_layer.query.element_size()
    elements = 2 * options.layers * options.kv_heads * options.head_dim
    read_bytes = options.batch * options.context * elements * element_bytes
    print(pairs.line(f"block_interleaved ({name})", "per layer is 1", "ms a step", 1e-3, 1e-3))
    rates = [read_bytes / GB / min(seconds) for seconds in (pairs.first_s, pairs.second_s)]
    print(f"    {read_bytes / GB:.3g} GB a step: {rates[0]:.0f} against {rates[1]:.0f} GB/s")
    for each in (interleaved, per_layer):
        client.free_kvcache(each.kv)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--group", type=int, default=4, help="query heads of each KV head")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pairs", type=int, default=9, help="timings of each")
    parser.add_argument("--kernel", choices=("auto", "triton", "torch"), default="auto")
    options = parser.parse_args(arguments)
    if options.context % BLOCK_TOKENS:
        parser.error(f"--context must be a multiple of {BLOCK_TOKENS}")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if not torch.cuda.is_available():
        raise SystemExit(f"{options.device}: this torch does not have CUDA")
    row_bytes = 2 * options.layers * options.kv_heads * options.head_dim * 4
    capacity = 3 * options.batch * (options.context + BLOCK_TOKENS) * row_bytes
    capacity += 16 * 2 * options.layers * PAGE_BYTES
    with (
        bench_device(PAGE_BYTES, options.device, capacity) as device,
        device.client("bench") as client,
        torch.inference_mode(),
    ):
        report(client, options)


if __name__ == "__main__":
    main()
