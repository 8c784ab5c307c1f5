"""How a model's KV cache lies in memory: what a layer keeps, in which order, how it grows.

`base` holds the arithmetic, `attention` what models keep, `hybrid` groups of layers whose blocks
live and die apart, `choice` the rule that picks an arrangement, `model_config` the way from a
config.json. Plain data: nothing here touches a device.
"""

from kvcached.layouts.attention import Heads, Latent, Layout, MixedLayout, MLALayout
from kvcached.layouts.base import ARRANGEMENTS, DTYPE_BYTES, Arrangement, KVLayout, TensorPlacement
from kvcached.layouts.choice import LayoutChoice, choose_layout
from kvcached.layouts.hybrid import HybridLayout, LayerGroup
from kvcached.layouts.model_config import layout_of_config

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
    "TensorPlacement",
    "choose_layout",
    "layout_of_config",
]
