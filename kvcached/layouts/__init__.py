"""Layouts of a model's KV cache in memory: the parts of a token, their order, and how it grows.

`base` has the arithmetic, `attention` the parts that models keep, `hybrid` groups of layers whose
blocks are freed separately, `engine_blocks` blocks that engines arrange, `choice` the rule that
picks an arrangement. Plain data: nothing here uses a device.
"""

from kvcached.layouts.attention import (
    Heads,
    Latent,
    Layout,
    MixedLayout,
    MLALayout,
    heads_of_rank,
)
from kvcached.layouts.base import ARRANGEMENTS, DTYPE_BYTES, Arrangement, KVLayout, TensorPlacement
from kvcached.layouts.choice import LayoutChoice, choose_layout
from kvcached.layouts.engine_blocks import PackedLayout, state_layout
from kvcached.layouts.hybrid import HybridLayout, LayerGroup

__all__ = [
    "ARRANGEMENTS",
    "DTYPE_BYTES",
    "Arrangement",
    "Heads",
    "HybridLayout",
    "KVLayout",
    "Latent",
    "LayerGroup",
    "Layout",
    "LayoutChoice",
    "MLALayout",
    "MixedLayout",
    "PackedLayout",
    "TensorPlacement",
    "choose_layout",
    "heads_of_rank",
    "state_layout",
]
