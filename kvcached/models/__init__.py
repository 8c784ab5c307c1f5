"""Sizes of a model, from its config.json: parameters, and KV and state. Nothing uses a device.

`families` has a reader for each `model_type`, made of `decoders`, `mixtures`, `classic` and
`hybrids`, which count with `parts`. `reading` picks the reader, and makes a KV layout of a shape.
`vision` has the towers of models that take images.
"""

from kvcached.models.families import TEXT_DEFAULTS
from kvcached.models.reading import layout_of_config, shape_of_config
from kvcached.models.shape import LayerShape, ModelShape, State
from kvcached.models.vision import VisionShape, vision_of_config

__all__ = [
    "TEXT_DEFAULTS",
    "LayerShape",
    "ModelShape",
    "State",
    "VisionShape",
    "layout_of_config",
    "shape_of_config",
    "vision_of_config",
]
