"""Arithmetic of layouts, without a device."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached import Heads, KVLayout, Latent, Layout, MixedLayout, MLALayout
from kvcached.errors import InvalidArgumentError
from kvcached.layouts import ARRANGEMENTS, DTYPE_BYTES

from .conftest import PAGE, SMOL


def test_a_block_that_divides_no_page() -> None:
    assert SMOL.k_token_bytes == 768
    assert SMOL.token_bytes == 60 * 768
    assert SMOL.num_buffers == 60
    assert SMOL.slab_tokens(PAGE) == 256
    assert SMOL.slab_pages(PAGE) == [3] * 60
    assert SMOL.quantum_bytes(PAGE) == 60 * 3 * PAGE


def test_interleaving_makes_one_buffer() -> None:
    blocks = replace(SMOL, arrangement="block_interleaved")
    assert (blocks.num_buffers, blocks.token_bytes) == (1, SMOL.token_bytes)
    # A block of 720 KiB: 4 of them fill 45 pages of 64 KiB.
    assert (blocks.slab_tokens(PAGE), blocks.slab_pages(PAGE)) == (64, [45])
    # With a gap of 1/16 after each token a block is 12 pages.
    padded = replace(blocks, padded_token_bytes=48 << 10)
    assert (padded.slab_tokens(PAGE), padded.slab_pages(PAGE)) == (16, [12])
    assert padded.quantum_bytes(PAGE) == 12 * PAGE
    assert padded.token_bytes == SMOL.token_bytes


def test_k_and_v_of_different_width_share_the_slab() -> None:
    layout = Layout(num_layers=1, num_kv_heads=1, head_dim=192, v_head_dim=128, block_tokens=1)
    tokens = layout.slab_tokens(PAGE)
    assert layout.slab_pages(PAGE) == [tokens * 384 // PAGE, tokens * 256 // PAGE]


def test_models_that_people_serve() -> None:
    """Bytes per token and quantum at 2 MiB, from the models' config files."""
    page = 2 << 20
    llama_8b = Layout(32, 8, 128)
    assert llama_8b.token_bytes == 128 << 10
    assert llama_8b.quantum_bytes(page) == 64 * page
    assert replace(llama_8b, arrangement="block_interleaved").quantum_bytes(page) == page
    assert replace(llama_8b, dtype="float8_e4m3fn").token_bytes == 64 << 10
    deepseek_v3 = MLALayout(61, kv_lora_rank=512, rope_dim=64)
    assert deepseek_v3.token_bytes == 61 * 576 * 2
    assert deepseek_v3.num_buffers == 61
    # 9/16 of 2 KiB a token and layer: 9 pages hold 1,024 blocks.
    assert deepseek_v3.quantum_bytes(page) == 61 * 9 * page
    deepseek_v2_lite_as_mha = Layout(27, 16, 192, v_head_dim=128)
    assert deepseek_v2_lite_as_mha.token_bytes == 27 * 16 * (192 + 128) * 2


shapes = st.one_of(
    st.builds(
        Heads,
        num_kv_heads=st.integers(1, 5),
        head_dim=st.sampled_from([4, 6, 16]),
        v_head_dim=st.sampled_from([None, 2, 16]),
    ),
    st.builds(Latent, kv_lora_rank=st.sampled_from([8, 24]), rope_dim=st.sampled_from([4, 8])),
)
layouts = st.builds(
    MixedLayout,
    layers=st.lists(shapes, min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    block_tokens=st.sampled_from([1, 3, 4, 16]),
    arrangement=st.sampled_from(ARRANGEMENTS),
)


@st.composite
def maybe_padded(draw: st.DrawFn) -> KVLayout:
    layout = draw(layouts)
    if layout.arrangement == "per_layer" or draw(st.booleans()):
        return layout
    gap = draw(st.integers(0, 20)) * DTYPE_BYTES[layout.dtype]
    return replace(layout, padded_token_bytes=layout.token_bytes + gap)


@given(layout=maybe_padded(), page_bytes=st.sampled_from([64, 256, 4096, 12288]))
def test_a_slab_is_the_least_that_fits_whole_pages_and_blocks(
    layout: KVLayout, page_bytes: int
) -> None:
    tokens = layout.slab_tokens(page_bytes)
    widths = layout.buffer_token_bytes

    def fits(count: int) -> bool:
        return all(count * width % page_bytes == 0 for width in widths)

    assert tokens % layout.block_tokens == 0
    assert fits(tokens)
    smaller = [tokens // prime for prime in (2, 3, 5, 7) if tokens % prime == 0]
    assert not any(fits(t) for t in smaller if t % layout.block_tokens == 0)
    assert layout.quantum_bytes(page_bytes) == sum(layout.slab_pages(page_bytes)) * page_bytes
    assert layout.quantum_bytes(page_bytes) >= tokens * layout.token_bytes


def touched_bytes(layout: KVLayout, blocks: int) -> list[tuple[int, np.ndarray]]:
    """Returns, for each part, its buffer and the first byte of every element by block."""
    element_bytes = DTYPE_BYTES[layout.dtype]
    touched = []
    for part in layout.parts:
        place = layout.blocks_of(part.layer, part.name, blocks)
        index = np.indices(place.shape).reshape(len(place.shape), blocks, -1)
        steps = np.array(place.strides).reshape(-1, 1, 1) * element_bytes
        touched.append((place.buffer, place.offset_bytes + (index * steps).sum(axis=0)))
    return touched


@given(layout=maybe_padded(), page_bytes=st.sampled_from([256, 4096]))
def test_no_two_elements_overlap_and_blocks_stay_on_their_slab(
    layout: KVLayout, page_bytes: int
) -> None:
    per_slab = layout.slab_tokens(page_bytes) // layout.block_tokens
    blocks = min(2 * per_slab, 24)
    pages = layout.slab_pages(page_bytes)
    starts: dict[int, list[np.ndarray]] = {}
    for buffer, addresses in touched_bytes(layout, blocks):
        starts.setdefault(buffer, []).append(addresses.ravel())
        slab = np.arange(blocks) // per_slab
        first = slab * pages[buffer] * page_bytes
        assert (addresses.min(axis=1) >= first).all()
        last = first + pages[buffer] * page_bytes - DTYPE_BYTES[layout.dtype]
        assert (addresses.max(axis=1) <= last).all()
    for addresses in starts.values():
        ordered = np.sort(np.concatenate(addresses))
        assert (np.diff(ordered) >= DTYPE_BYTES[layout.dtype]).all()
    assert sorted(starts) == list(range(layout.num_buffers))


@given(layout=maybe_padded())
def test_tokens_and_blocks_are_the_same_memory(layout: KVLayout) -> None:
    blocks = 3
    for part in layout.parts:
        place = layout.blocks_of(part.layer, part.name, blocks)
        try:
            rows = layout.tokens_of(part.layer, part.name, blocks * layout.block_tokens)
        except InvalidArgumentError:
            assert layout.arrangement == "block_interleaved"
            assert layout.block_tokens > 1
            continue
        assert (rows.buffer, rows.offset_bytes) == (place.buffer, place.offset_bytes)
        assert rows.shape == (blocks * layout.block_tokens, *place.shape[2:])
        for token in range(rows.shape[0]):
            block, row = divmod(token, layout.block_tokens)
            at = block * place.strides[0] + row * place.strides[1]
            assert token * rows.strides[0] == at
        assert rows.strides[1:] == place.strides[2:]


@given(tokens=st.integers(0, 5000), reserved=st.integers(0, 3))
def test_need_is_whole_slabs_and_no_more(tokens: int, reserved: int) -> None:
    layout = Layout(2, 2, 64, dtype="float32")
    need = layout.need_bytes(tokens, PAGE, reserved_blocks=reserved)
    blocks = -(-tokens // 16) + reserved
    slabs = need // layout.quantum_bytes(PAGE)
    assert need % layout.quantum_bytes(PAGE) == 0
    assert slabs * layout.slab_tokens(PAGE) >= blocks * 16 > (slabs - 1) * layout.slab_tokens(PAGE)


def test_layers_of_a_model_make_a_layout() -> None:
    assert Layout(6, 2, 8).of_layers([1, 4]) == Layout(2, 2, 8)
    assert MLALayout(6, 16, 8).of_layers([3]) == MLALayout(1, 16, 8)
    mixed = MixedLayout((Heads(1, 8), Heads(2, 8), Latent(8, 4)))
    assert mixed.of_layers([2, 0]).layers == (Latent(8, 4), Heads(1, 8))
    assert [part.layer for part in mixed.parts] == [0, 0, 1, 1, 2]
    assert mixed.layer_count == 3


def test_parts_lie_in_order() -> None:
    layout = replace(Layout(2, 2, 8, block_tokens=4), arrangement="block_interleaved")
    offsets = [layout.blocks_of(p.layer, p.name, 1).offset_bytes for p in layout.parts]
    assert [b - a for a, b in pairwise(offsets)] == [4 * 32] * 3


@pytest.mark.parametrize(
    "changed",
    [
        {"num_layers": 0},
        {"num_kv_heads": 0},
        {"head_dim": -1},
        {"v_head_dim": 0},
        {"dtype": "fp4"},
        {"block_tokens": 0},
        {"block_tokens": 1.5},
        {"arrangement": "by_head"},
        {"padded_token_bytes": 64},
        {"padded_token_bytes": 31, "arrangement": "block_interleaved"},
        {"padded_token_bytes": 33, "arrangement": "token_interleaved"},
    ],
)
def test_impossible_layouts_are_refused(changed: dict[str, object]) -> None:
    fields: dict[str, object] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, **changed}
    with pytest.raises(InvalidArgumentError, match=next(iter(changed))):
        Layout(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MLALayout(0, 8, 8), "num_layers"),
        (lambda: MLALayout(1, 0, 8), "kv_lora_rank"),
        (lambda: MLALayout(1, 8, 0), "rope_dim"),
        (lambda: MLALayout(1, 8, 8, 131), "index_bytes is 131; it must be a multiple"),
        (lambda: MLALayout(1, 8, 8, -2), "index_bytes"),
        (lambda: MixedLayout(()), "layers must be a tuple"),
        (lambda: MixedLayout([Heads(1, 8)]), "layers must be a tuple"),
        (lambda: MixedLayout((8,)), "only Heads and Latent"),
        (lambda: Layout(1, 1, 8).slab_tokens(0), "page_bytes"),
        (lambda: Layout(1, 1, 8).blocks_of(1, "k", 1), "layer 1 is not in"),
        (lambda: Layout(1, 1, 8).need_bytes(-1, 4096), "num_tokens"),
    ],
)
def test_other_wrong_parameters_are_refused(make: object, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        make()  # type: ignore[operator]
