"""Comparison of a checkpoint's tensors with the sizes that its config.json describes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from kvcached import CheckpointTensor, Heads
from kvcached.models import LayerShape, ModelShape, shape_of_config, vision_of_config
from prism.models.files import checkpoint_of, quantized_by
from prism.models.gguf.gguf_weights import GGUF, as_in_transformers
from prism.models.text_part import text_weight
from prism.models.weight_names import is_known

# Tensors by name; those of a layer by the name within it.
Tensors = Mapping[str, CheckpointTensor]

_LAYER = re.compile(r"(?:.*?\.)?(?:layers|h|blocks)\.(\d+)\.(.+)")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embed_in|embeddings|word_embeddings)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
# Tensors that are not parameters: masks, rotary tables, positions, corrections of routers, and
# layers that predict further tokens.
_IGNORED = re.compile(
    r"^mtp\.|\.(attn|attention)\.(bias|masked_bias)$|\.(rotary_emb\.\w+|position_ids)$"
    r"|(?<!\.moe_statics)\.(e_score_correction|expert)_bias$"
)
_OF_KV = re.compile(r"\.[kv]_(proj|norm)\.weight$")
_FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def weights_differ(
    model: Path,
    config: Mapping[str, Any],
    words: Collection[str] = (),
    *,
    in_part: bool = False,
) -> str:
    """Returns how the tensors in the folder `model` differ from `config`, with the tensor and what
    to change, "" if an engine can load them. Only headers are read.

    Tensors that engines ignore may be there, too. Quantized ones are only compared if they are in
    GGUF, where they have the same names and shapes.

    Args:
        words: of the names that the engine's loader knows (`weight_names`); empty: not known.
        in_part: they are a whole model's, whose language model `config` describes.
    """
    checkpoint, method = checkpoint_of(model), quantized_by(config, model)
    if method and method != GGUF:
        return ""
    tensors = as_in_transformers(checkpoint) if method else checkpoint.tensors
    shape = shape_of_config(config)
    layers: dict[int, dict[str, CheckpointTensor]] = defaultdict(dict)
    others = {}
    for whole_name, tensor in tensors.items():
        name = text_weight(whole_name) if in_part else whole_name
        if name is None or _IGNORED.search(name):
            continue
        if tensor.spec.dtype not in _FLOATS:
            return f"has {name} in {tensor.spec.dtype}; give an unquantized checkpoint"
        if match := _LAYER.fullmatch(name):
            layers[int(match[1])][match[2]] = tensor
        else:
            others[name] = tensor
    found = max(layers, default=-1) + 1 - int(config.get("num_nextn_predict_layers") or 0)
    own = [_used(layers[number], layer) for number, layer in enumerate(shape.layers)]
    problems = chain(
        _wrong_tables(others, shape),
        _wrong_count(own, found),
        _wrong_layers(own, shape),
        _unknown_names(own, shape, words),
        _wrong_rest(others, shape),
    )
    return next(problems, "")


def _used(tensors: Tensors, layer: LayerShape) -> Tensors:
    """Returns a layer's tensors without those of K and V, if it reads another layer's."""
    if layer.kv is not None or not layer.heads:
        return tensors
    return {name: each for name, each in tensors.items() if not _OF_KV.search(name)}


def vision_differs(model: Path, config: Mapping[str, Any], *, plain: bool) -> str:
    """Returns how the vision tower's tensors in the folder `model` differ from `config`, "" if they
    are as many numbers. `plain`: engines do not load a quantized tower."""
    shape, method = vision_of_config(config), quantized_by(config, model)
    if shape is None or (method and not plain):
        return ""
    tensors = checkpoint_of(model).tensors.items()
    found = _numbers(t for n, t in tensors if text_weight(n) is None and not _IGNORED.search(n))
    if found == shape.parameters:
        return ""
    if method:
        return (
            f"has a vision tower quantized by {method}, which engines load in 16 or 32 bits; give"
            " weights whose tower is not quantized, or set images: false"
        )
    return (
        f"has {found} parameters in its vision tower and projector, but config.json describes"
        f" {shape.parameters}; correct vision_config, or complete the files"
    )


def _wrong_tables(others: Tensors, shape: ModelShape) -> Iterator[str]:
    """Yields problems of the embedding and of the output matrix."""
    tables = [name for name in others if _EMBEDDING.search(name)]
    heads = [name for name in others if _HEAD.search(name)]
    if not tables:
        yield "lacks the embedding (embed_tokens.weight); complete the files"
    if not heads and not shape.tied:
        yield (
            "lacks lm_head.weight, but config.json has tie_word_embeddings false; complete the"
            " files, or correct config.json to true"
        )
    for name in (*tables, *heads):
        rows, *columns = others[name].spec.shape or (0,)
        narrow = shape.head_parameters < shape.vocab_size * shape.hidden_size
        if rows != shape.vocab_size or (columns != [shape.hidden_size] and not narrow):
            expected = [shape.vocab_size, shape.hidden_size]
            yield _shaped(
                others[name], f"config.json gives {expected}, by vocab_size and hidden_size"
            )


def _wrong_count(own: Sequence[Tensors], found: int) -> Iterator[str]:
    """Yields problems of the number of layers, of which the files have `found`."""
    described = f"but config.json describes {len(own)}; correct the number of layers"
    for number, tensors in enumerate(own):
        if not tensors:
            yield f"lacks the tensors of layer {number}, {described}, or complete the files"
    if found > len(own):
        yield f"has tensors of {found} layers, {described}"


def _wrong_layers(own: Sequence[Tensors], shape: ModelShape) -> Iterator[str]:
    """Yields problems of layers, by other layers of the same kind and by the config.json."""
    alike = defaultdict(list)
    for tensors, layer in zip(own, shape.layers, strict=True):
        alike[layer].append(tensors)
    usual = {layer: _usual(those) for layer, those in alike.items()}
    for number, (tensors, layer) in enumerate(zip(own, shape.layers, strict=True)):
        for name, extents in usual[layer].items():
            if name in tensors and tensors[name].spec.shape != extents:
                yield _shaped(tensors[name], f"other layers have {[*extents]}")
        total = _numbers(tensors.values())
        matrices = _numbers(each for each in tensors.values() if len(each.spec.shape) > 1)
        # Engines ignore biases and norms that they do not look for.
        if matrices <= layer.parameters <= total:
            continue
        if lacking := sorted(usual[layer].keys() - tensors.keys()):
            yield f"lacks {lacking[0]} of layer {number}; complete the files"
        yield from _wrong_projections(tensors, layer, shape.hidden_size)
        yield (
            f"has {total} parameters in layer {number}, but config.json describes"
            f" {layer.parameters}; correct its heads, biases, experts or intermediate_size, or"
            " complete the files"
        )


def _unknown_names(
    own: Sequence[Tensors], shape: ModelShape, words: Collection[str]
) -> Iterator[str]:
    """Yields names that the loader does not know, of layers that are not complete without them."""
    for tensors, layer in zip(own, shape.layers, strict=True):
        unknown = [name for name in tensors if words and not is_known(name, words)]
        known = _numbers(each for name, each in tensors.items() if name not in unknown)
        if unknown and known < layer.parameters:
            yield (
                f"has {tensors[unknown[0]].name}, a name that the loader of {shape.model_type} does"
                " not know; save the weights with the names that transformers gives them"
            )


def _wrong_rest(others: Tensors, shape: ModelShape) -> Iterator[str]:
    """Yields a lack of norms and other tensors outside of layers."""
    expected = shape.parameters - sum(layer.parameters for layer in shape.layers)
    counted = [each for name, each in others.items() if not (shape.tied and _HEAD.search(name))]
    if (found := _numbers(counted)) < expected:
        yield (
            f"has {found} parameters outside of its layers, but config.json describes {expected};"
            f" complete the files, which have {', '.join(others)}"
        )


def _usual(layers: Sequence[Tensors]) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes that most of these layers have."""
    kinds = Counter(frozenset((n, t.spec.shape) for n, t in tensors.items()) for tensors in layers)
    return dict(max(kinds.items(), key=lambda kind: (kind[1], len(kind[0])))[0])


def _wrong_projections(tensors: Tensors, layer: LayerShape, hidden: int) -> Iterator[str]:
    """Yields projections of attention whose shapes are not those of config.json."""
    if not isinstance(layer.kv, Heads):
        return
    k, v = layer.kv.parts(0)
    outputs = {
        "q_proj": layer.heads * k.dim,
        "k_proj": k.heads * k.dim,
        "v_proj": v.heads * v.dim,
    }
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        if module in outputs and tensor.spec.shape != (outputs[module], hidden):
            expected = [outputs[module], hidden]
            yield _shaped(tensor, f"config.json gives {expected}, by its heads and hidden_size")


def _shaped(tensor: CheckpointTensor, expected: str) -> str:
    shape = [*tensor.spec.shape]
    return f"has {tensor.name} of shape {shape}, but {expected}; correct config.json or the files"


def _numbers(tensors: Iterable[CheckpointTensor]) -> int:
    return sum(prod(tensor.spec.shape) for tensor in tensors)
