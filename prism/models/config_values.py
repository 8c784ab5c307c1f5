"""Checks of values in a config.json that change no size, but with which no engine loads a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from prism.models.text_part import text_config

if TYPE_CHECKING:
    from kvcached.models import ModelShape

# Object of wrong values, key in it, what is expected of the value.
Wrong = tuple[Mapping[str, Any], str, str]

_ROPES = ("rope_scaling", "rope_parameters")
# Types of rotary positions -> the keys that they need, with positive numbers.
_ROPE_TYPES: dict[str, Sequence[str]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "deepseek_yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": (),
    "su": (),  # LongRoPE in older files
    "mrope": (),
    "proportional": (),
}
_FACTOR_LISTS = ("short_factor", "long_factor")  # of LongRoPE
# Keys that some types of rotary positions have, with positive numbers.
_ROPE_NUMBERS = (
    "rope_theta",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
)
# Families without rotary positions.
_NOT_ROTARY = frozenset({"bloom", "gpt2", "gpt_bigcode", "opt"})
_HUGE = 2**63
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation")


def wrong_values(config: Mapping[str, Any], decoder: ModelShape) -> Iterator[Wrong]:
    """Yields the wrong values of a config.json, whose shape is `decoder`."""
    text = text_config(config)
    for name in _EPSILONS:
        if name in text and not (is_number(text[name]) and text[name] >= 0):
            yield text, name, "a number of at least 0"
    for name in _ACTIVATIONS:
        if not isinstance(text.get(name, ""), str | None):
            yield text, name, "the name of an activation"
    yield from _wrong_ropes(text, decoder)
    if decoder.model_type not in _NOT_ROTARY:
        yield from _odd_heads(text, decoder)
    for values in (text, config):
        if not all(type(one) is int for one in end_ids_of(values)):
            yield values, "eos_token_id", "a token's number, or a list of them"


def end_ids_of(values: Mapping[str, Any]) -> list[Any]:
    """Returns the end-of-sequence tokens that config.json or generation_config.json has."""
    ids = values.get("eos_token_id")
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def is_number(value: object) -> TypeGuard[int | float]:
    """Returns whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _HUGE


def _is_positive(value: object) -> bool:
    return is_number(value) and value > 0


def _wrong_ropes(text: Mapping[str, Any], decoder: ModelShape) -> Iterator[Wrong]:
    for name in ("rope_theta", "original_max_position_embeddings"):
        if text.get(name) is not None and not _is_positive(text[name]):
            yield text, name, "a positive number"
    part = text.get("partial_rotary_factor")
    if part is not None and not (_is_positive(part) and part <= 1):
        yield text, "partial_rotary_factor", "a number above 0, up to 1"
        return
    for name in _ROPES:
        rope = text.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            yield text, name, "an object"
            continue
        by_layer = [part for part in rope.values() if isinstance(part, Mapping)]
        for part in by_layer or [rope]:
            for expected in _expected_of_rope(part, _turned(text, part, decoder)):
                yield text, name, expected


def _turned(text: Mapping[str, Any], rope: Mapping[str, Any], decoder: ModelShape) -> int:
    """Returns the numbers of a head that rotary positions turn."""
    kept = next((layer.kv for layer in decoder.layers if layer.kv), None)
    if kept is None:
        return 0
    rotary_dim: int = getattr(kept, "rope_dim", None) or kept.parts(0)[0].dim
    factor = rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1
    return int(rotary_dim * factor) if is_number(factor) else 0


def _expected_of_rope(rope: Mapping[str, Any], turned: int) -> Iterator[str]:
    """Yields what is expected of an object of rotary positions that turn this many numbers of a
    head."""
    kind = rope.get("rope_type", rope.get("type", "" if "factor" in rope else "default"))
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        yield f"an object with a rope_type of {', '.join(_ROPE_TYPES)}"
        return
    for name in _ROPE_TYPES[kind]:
        if not _is_positive(rope.get(name)):
            yield f"an object with a positive {name}, which rope_type {kind} needs"
    for name in _FACTOR_LISTS if kind in ("longrope", "su") else ():
        factors = rope.get(name)
        if not isinstance(factors, list) or not factors or not all(map(_is_positive, factors)):
            yield f"an object with a list {name} of positive numbers, which rope_type {kind} needs"
        elif turned and len(factors) != turned // 2:
            yield f"an object with {turned // 2} numbers of {name}, for {turned} of a head"
    for name in _ROPE_NUMBERS:
        if rope.get(name) is not None and not _is_positive(rope[name]):
            yield f"an object with a positive {name}"
    sections = rope.get("mrope_section")
    if sections is None and kind != "mrope":
        return
    if not isinstance(sections, list) or not all(type(each) is int for each in sections):
        yield "an object with an mrope_section of whole numbers"


def _odd_heads(text: Mapping[str, Any], decoder: ModelShape) -> Iterator[Wrong]:
    """Yields the key of heads whose dimension is odd, which rotary positions cannot turn."""
    for layer in decoder.layers:
        dims = [part.dim for part in layer.kv.parts(0)] if layer.kv else []
        if dims and dims[0] % 2:
            name = "head_dim" if text.get("head_dim") else "hidden_size"
            expected = "even" if name == "head_dim" else "that of heads with an even dimension"
            yield text, name, expected
            return
