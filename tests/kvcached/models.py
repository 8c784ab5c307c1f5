"""Shapes of models for the tests of layouts, small enough for pages of 4 KiB."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvcached import Heads, KVLayout, Latent, Layout, MixedLayout, MLALayout
from kvcached.layouts import ARRANGEMENTS

SHAPES: dict[str, KVLayout] = {
    "mha": Layout(3, 4, 16, dtype="float32", block_tokens=4),
    "gqa-odd": Layout(2, 3, 16, dtype="float16", block_tokens=8),
    "mqa": Layout(2, 1, 64, dtype="bfloat16", block_tokens=16),
    "wide-k": Layout(2, 2, 24, v_head_dim=16, dtype="float16", block_tokens=4),
    "mla": MLALayout(3, 64, 16, dtype="bfloat16", block_tokens=8),
    "e4m3": Layout(2, 2, 64, dtype="float8_e4m3fn", block_tokens=16),
    "sparse": MLALayout(3, 64, 16, 132, dtype="bfloat16", block_tokens=8),
    "e5m2": MLALayout(2, 48, 16, dtype="float8_e5m2", block_tokens=8),
    "mixed": MixedLayout(
        layers=(Heads(2, 16), Heads(1, 32, 16), Latent(24, 8)), dtype="float32", block_tokens=4
    ),
    "single-tokens": Layout(2, 2, 8, dtype="float64", block_tokens=1),
}


def every_layout() -> Iterator[tuple[str, KVLayout]]:
    """Yields each shape in each arrangement, and with a gap of an odd number of elements."""
    for name, shape in SHAPES.items():
        for arrangement in ARRANGEMENTS:
            layout = replace(shape, arrangement=arrangement)
            yield f"{name}-{arrangement}", layout
            if arrangement != "per_layer":
                padded = layout.token_bytes + 24
                yield f"{name}-{arrangement}-padded", replace(layout, padded_token_bytes=padded)


LAYOUTS = dict(every_layout())
