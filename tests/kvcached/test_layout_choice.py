"""The rule that picks an arrangement: quanta of all models against the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached import Layout, MLALayout, choose_layout
from kvcached.errors import InvalidArgumentError
from kvcached.layouts.choice import PADDING_MAX, QUANTA_SHARE_MAX

PAGE = 2 << 20
LLAMA = Layout(32, 8, 128)
SMOL = Layout(30, 3, 64)


def test_per_layer_while_its_quanta_are_few() -> None:
    alone = choose_layout(LLAMA, page_bytes=PAGE, device_bytes=80 << 30, models=8)
    assert alone.layout == LLAMA
    assert alone.quanta_share == 8 * (128 << 20) / (80 << 30)
    assert "per_layer: a quantum of 134217728 bytes, for 8 models 1.25%" in alone.reason
    crowded = choose_layout(LLAMA, page_bytes=PAGE, device_bytes=80 << 30, models=24)
    assert crowded.layout == replace(LLAMA, arrangement="block_interleaved")
    assert crowded.quantum_bytes == PAGE


def test_kernels_have_the_say() -> None:
    chosen = choose_layout(
        LLAMA,
        page_bytes=PAGE,
        device_bytes=80 << 30,
        models=24,
        accepted=("per_layer", "token_interleaved"),
    )
    assert chosen.layout.arrangement == "token_interleaved"
    bound = choose_layout(
        LLAMA, page_bytes=PAGE, device_bytes=80 << 30, models=24, accepted=["per_layer"]
    )
    assert bound.layout == LLAMA
    assert "over the limit of 3%" in bound.reason


def test_a_gap_only_where_it_is_needed() -> None:
    roomy = choose_layout(SMOL, page_bytes=PAGE, device_bytes=80 << 30, models=8)
    assert (roomy.quantum_bytes >> 20, roomy.padding_share) == (90, 0)
    tight = choose_layout(SMOL, page_bytes=PAGE, device_bytes=2 << 30, models=8)
    assert (tight.quantum_bytes >> 20, tight.padding_share) == (6, 0.0625)
    assert tight.layout.padded_token_bytes == 24 << 10
    hopeless = choose_layout(SMOL, page_bytes=PAGE, device_bytes=64 << 20, models=8)
    assert hopeless.quantum_bytes == tight.quantum_bytes
    assert "over the limit of 3%" in hopeless.reason


@given(
    layout=st.one_of(
        st.builds(
            Layout,
            st.integers(1, 80),
            st.integers(1, 32),
            st.sampled_from([32, 64, 80, 96, 128, 192, 256]),
            dtype=st.sampled_from(["bfloat16", "float8_e4m3fn"]),
        ),
        st.builds(MLALayout, st.integers(1, 61), st.sampled_from([256, 512]), st.just(64)),
    ),
    page_bytes=st.sampled_from([64 << 10, 2 << 20]),
    device_gib=st.integers(1, 200),
    models=st.integers(1, 40),
)
def test_the_choice_holds_what_it_says(
    layout: Layout, page_bytes: int, device_gib: int, models: int
) -> None:
    device_bytes = device_gib << 30
    chosen = choose_layout(layout, page_bytes=page_bytes, device_bytes=device_bytes, models=models)
    stock_share = layout.quantum_bytes(page_bytes) * models / device_bytes
    if stock_share <= QUANTA_SHARE_MAX:
        assert chosen.layout == layout
    assert chosen.quantum_bytes == chosen.layout.quantum_bytes(page_bytes)
    assert chosen.quantum_bytes <= layout.quantum_bytes(page_bytes)
    assert 0 <= chosen.padding_share <= PADDING_MAX
    assert chosen.layout.token_bytes == layout.token_bytes
    for other in ("block_interleaved", "token_interleaved"):
        dense = replace(layout, arrangement=other)
        if dense.quantum_bytes(page_bytes) * models <= QUANTA_SHARE_MAX * device_bytes:
            assert chosen.padding_share == 0


def test_wrong_parameters_are_refused() -> None:
    for wrong in ({"models": 0}, {"device_bytes": 0}, {"page_bytes": 0}, {"accepted": ["by_head"]}):
        sizes = {"page_bytes": PAGE, "device_bytes": 1 << 30, **wrong}
        with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
            choose_layout(LLAMA, **sizes)
