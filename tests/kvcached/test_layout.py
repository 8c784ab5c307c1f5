from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached import Layout
from kvcached.errors import InvalidArgumentError

from .conftest import PAGE, SMOL


def test_a_block_that_divides_no_page() -> None:
    assert SMOL.k_token_bytes == 768
    assert SMOL.token_bytes == 60 * 768
    assert SMOL.num_buffers == 60
    assert SMOL.slab_tokens(PAGE) == 256
    assert SMOL.slab_pages(PAGE) == [3] * 60
    assert SMOL.quantum_bytes(PAGE) == 60 * 3 * PAGE


def test_k_and_v_of_different_width_share_the_slab() -> None:
    layout = Layout(num_layers=1, num_kv_heads=1, head_dim=192, v_head_dim=128, block_tokens=1)
    tokens = layout.slab_tokens(PAGE)
    assert layout.slab_pages(PAGE) == [tokens * 384 // PAGE, tokens * 256 // PAGE]


@given(
    heads=st.integers(1, 12),
    head_dim=st.sampled_from([8, 64, 80, 96, 128]),
    v_head_dim=st.sampled_from([None, 16, 48, 128]),
    block_tokens=st.sampled_from([1, 16, 24, 64]),
)
def test_a_slab_is_the_least_that_fits_whole_pages_and_blocks(
    heads: int, head_dim: int, v_head_dim: int | None, block_tokens: int
) -> None:
    layout = Layout(
        num_layers=1,
        num_kv_heads=heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        block_tokens=block_tokens,
    )
    widths = (layout.k_token_bytes, layout.v_token_bytes)
    page = 4096
    least = next(
        tokens
        for tokens in range(block_tokens, 1 << 22, block_tokens)
        if all(tokens * width % page == 0 for width in widths)
    )
    assert layout.slab_tokens(page) == least
    assert layout.quantum_bytes(page) == sum(layout.slab_pages(page)) * page


@pytest.mark.parametrize(
    "changed",
    [{"num_layers": 0}, {"head_dim": -1}, {"v_head_dim": 0}, {"dtype": "fp4"}, {"block_tokens": 0}],
)
def test_impossible_layouts_are_refused(changed: dict[str, object]) -> None:
    fields: dict[str, object] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, **changed}
    with pytest.raises(InvalidArgumentError, match=next(iter(changed))):
        Layout(**fields)  # type: ignore[arg-type]
