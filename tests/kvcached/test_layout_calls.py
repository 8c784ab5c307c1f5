"""Driver calls of a page step, per layout: the table of docs/kvcached.md, counted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from kvcached import Client, Device, HybridLayout, KVLayout, Layout, MLALayout

from .libcuda import LibCuda

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "kvcached.md"
PAGE = 2 << 20

LLAMA = Layout(32, 8, 128)
LATENT = MLALayout(27, 512, 64)
GEMMA = Layout(62, 16, 128)
GEMMA_WINDOW = [layer for layer in range(62) if layer % 6 != 5]
LAYOUTS: dict[str, KVLayout | HybridLayout] = {
    "Llama-3.1-8B, per layer": LLAMA,
    "Llama-3.1-8B, block-interleaved": replace(LLAMA, arrangement="block_interleaved"),
    "Llama-3.1-8B, token-interleaved": replace(LLAMA, arrangement="token_interleaved"),
    "Llama-3.1-8B, block-interleaved, float8": replace(
        LLAMA, arrangement="block_interleaved", dtype="float8_e4m3fn"
    ),
    "DeepSeek-V2-Lite (MLA), per layer": LATENT,
    "DeepSeek-V2-Lite (MLA), block-interleaved, padded by 5 %": replace(
        LATENT, arrangement="block_interleaved", padded_token_bytes=32 << 10
    ),
    "Gemma-3-27B, both groups, per layer": HybridLayout.sliding(GEMMA, GEMMA_WINDOW, 1024),
    "Gemma-3-27B, both groups, block-interleaved": HybridLayout.sliding(
        replace(GEMMA, arrangement="block_interleaved"), GEMMA_WINDOW, 1024
    ),
}


def rows() -> dict[str, list[int]]:
    """Returns the table: tokens and MiB of a quantum, then driver calls of a step up and down."""
    table = DOCUMENT.read_text().split("Driver calls of one page step")[1].split("\n\n")[1]
    lines = [re.findall(r"[^|]+", line) for line in table.splitlines()[2:]]
    return {line[0].strip(): [int(cell.replace(",", "")) for cell in line[1:]] for line in lines}


@pytest.fixture
def client(libcuda: LibCuda) -> Iterator[Client]:
    namespace = f"t{uuid4().hex[:10]}"
    device = Device.open("cuda:0", capacity_bytes=512 * PAGE, page_bytes=PAGE, namespace=namespace)
    with device.client("test", background=False) as opened:
        yield opened
    device.destroy()


def groups_of(layout: KVLayout | HybridLayout) -> list[KVLayout]:
    return [g.layout for g in layout.groups] if isinstance(layout, HybridLayout) else [layout]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_documented_calls_are_what_a_step_makes(
    client: Client, libcuda: LibCuda, name: str
) -> None:
    layout = LAYOUTS[name]
    kv = client.alloc_kvcache(layout, 1 << 16, reserved_blocks=0)
    libcuda.reset()
    if isinstance(layout, HybridLayout):
        ids = kv.alloc_kv({"full": 1, "window": 1})
    else:
        ids = kv.alloc_kv(1)
    up = libcuda.count()
    libcuda.reset()
    kv.free_kv(ids)
    down = libcuda.count()
    tokens = min(group.slab_tokens(PAGE) for group in groups_of(layout))
    calls = [up["Create"], up["Map"], up["SetAccess"], down["Unmap"], down["Release"]]
    assert len(up) + len(down) == 5
    assert [tokens, layout.quantum_bytes(PAGE) >> 20, *calls] == rows()[name]


def test_every_row_is_counted() -> None:
    assert list(rows()) == list(LAYOUTS)


@pytest.mark.parametrize("arrangement", ["per_layer", "block_interleaved"])
def test_a_longer_step_shares_the_calls_that_take_ranges(
    client: Client, libcuda: LibCuda, arrangement: str
) -> None:
    """Takes 64 pages for 1,024 tokens either way. Interleaved, they are one run."""
    kv = client.alloc_kvcache(replace(LLAMA, arrangement=arrangement), 1 << 14, reserved_blocks=0)
    libcuda.reset()
    ids = kv.alloc_kv(64)
    runs = {"per_layer": 64, "block_interleaved": 1}[arrangement]
    assert libcuda.count() == {"Create": 64, "Map": 64, "SetAccess": runs}
    libcuda.reset()
    kv.free_kv(ids)
    assert libcuda.count() == {"Unmap": runs, "Release": 64}
