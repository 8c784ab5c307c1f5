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
# Types of rotary positions -> the keys that they need, with positive numbers or lists of them.
_ROPE_TYPES: dict[str, Sequence[str]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "deepseek_yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "su": ("short_factor", "long_factor"),  # LongRoPE in older files
    "mrope": (),
    "proportional": (),
}
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
    yield from _wrong_ropes(text)
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


def _wrong_ropes(text: Mapping[str, Any]) -> Iterator[Wrong]:
    if text.get("rope_theta") is not None and not _is_positive(text["rope_theta"]):
        yield text, "rope_theta", "a positive number"
    for name in _ROPES:
        rope = text.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            yield text, name, "an object"
            continue
        by_layer = [part for part in rope.values() if isinstance(part, Mapping)]
        for part in by_layer or [rope]:
            if expected := _expected_of_rope(part):
                yield text, name, expected


def _expected_of_rope(rope: Mapping[str, Any]) -> str:
    """Returns what is expected of an object of rotary positions, "" if it is right."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        return f"an object with a rope_type of {', '.join(_ROPE_TYPES)}"
    for name in _ROPE_TYPES[kind]:
        values = rope.get(name)
        listed = values if isinstance(values, list) and values else [values]
        if not all(_is_positive(value) for value in listed):
            return f"an object with a positive {name}, which rope_type {kind} needs"
    if "rope_theta" in rope and not _is_positive(rope["rope_theta"]):
        return "an object with a positive rope_theta"
    return ""


def _odd_heads(text: Mapping[str, Any], decoder: ModelShape) -> Iterator[Wrong]:
    """Yields the key of heads whose dimension is odd, which rotary positions cannot turn."""
    for layer in decoder.layers:
        dims = [part.dim for part in layer.kv.parts(0)] if layer.kv else []
        if dims and dims[0] % 2:
            name = "head_dim" if text.get("head_dim") else "hidden_size"
            expected = "even" if name == "head_dim" else "that of heads with an even dimension"
            yield text, name, expected
            return
