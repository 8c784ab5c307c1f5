"""Kinds of layers and rotary positions with which no engine loads a model, and lines of `check`."""

from __future__ import annotations

from tests.config.model_edits import GEMMA3, LLAMA3, LONGROPE, MISTRAL, SLIDES, Edit, keys

LAYERS: dict[str, tuple[Edit, str]] = {
    "layer_types of another length": (
        GEMMA3(layer_types=["full_attention"]),
        "models[0].path: {m}/config.json has 1 layer_types for 2 layers; correct one of them",
    ),
    "an unknown kind of layer": (
        GEMMA3(layer_types=["full_attention", "magic"]),
        "models[0].path: {m}/config.json has layer_types magic; correct the file to some of"
        " full_attention, sliding_attention, or give a model without such layers",
    ),
    "windows in a family without": (
        keys(layer_types=SLIDES, sliding_window=16),
        'models[0].path: {m}/config.json has layer_types ["full_attention",'
        ' "sliding_attention"], which changes no llama model; remove the key, or correct'
        " model_type",
    ),
    "layer_types of another length in a family without windows": (
        keys(layer_types=["full_attention"]),
        "models[0].path: {m}/config.json has 1 layer_types for 2 layers; correct one of them",
    ),
    "a negative window": (
        MISTRAL(sliding_window=-1),
        "models[0].path: {m}/config.json has sliding_window -1, which is not a whole number"
        " of at least 0; correct the file",
    ),
    "a window that is text": (
        MISTRAL(sliding_window="4096"),
        'models[0].path: {m}/config.json has sliding_window "4096", which is not a whole'
        " number of at least 0; correct the file",
    ),
    "an unknown kind of positions": (
        keys(rope_scaling={"rope_type": "magic", "factor": 2.0}),
        'models[0].path: {m}/config.json has rope_scaling {{"rope_type": "magic", "factor":'
        " 2.0}}, which is not an object with a rope_type of default, linear, dynamic, yarn,"
        " deepseek_yarn, llama3, longrope, su, mrope, proportional; correct the file",
    ),
    "positions without their factor": (
        keys(rope_scaling={"rope_type": "linear"}),
        'models[0].path: {m}/config.json has rope_scaling {{"rope_type": "linear"}}, which is'
        " not an object with a positive factor, which rope_type linear needs; correct the"
        " file",
    ),
    "positions with a factor of 0": (
        keys(rope_scaling={"rope_type": "yarn", "factor": 0}),
        'models[0].path: {m}/config.json has rope_scaling {{"rope_type": "yarn", "factor":'
        " 0}}, which is not an object with a positive factor, which rope_type yarn needs;"
        " correct the file",
    ),
    "YaRN without its factor": (
        keys(rope_scaling={"rope_type": "yarn"}),
        'models[0].path: {m}/config.json has rope_scaling {{"rope_type": "yarn"}}, which is not an'
        " object with a positive factor, which rope_type yarn needs; correct the file",
    ),
    "positions of Llama 3 without a key": (
        keys(rope_scaling={k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}),
        'models[0].path: {m}/config.json has rope_scaling {{"rope_type": "llama3", "factor": 8.0,'
        ' "high_freq_factor": 4, which is not an object with a positive low_freq_factor, which'
        " rope_type llama3 needs; correct the file",
    ),
    "LongRoPE without its lists": (
        keys(rope_scaling={"rope_type": "longrope", "short_factor": 2.0}),
        'models[0].path: {m}/config.json has rope_scaling {{"rope_type": "longrope",'
        ' "short_factor": 2.0}}, which is not an object with a list short_factor of positive'
        " numbers, which rope_type longrope needs; correct the file",
    ),
    "LongRoPE with short lists": (
        keys(rope_scaling={**LONGROPE, "long_factor": [1.0]}),
        'models[0].path: {m}/config.json has rope_scaling {{"rope_type": "longrope",'
        ' "short_factor": [1.0, 1.0, 1.0, 1., which is not an object with 4 numbers of long_factor,'
        " for 8 of a head; correct the file",
    ),
    "LongRoPE with lists for a part of a head": (
        keys(rope_scaling=LONGROPE, partial_rotary_factor=0.5),
        'models[0].path: {m}/config.json has rope_scaling {{"rope_type": "longrope",'
        ' "short_factor": [1.0, 1.0, 1.0, 1., which is not an object with 2 numbers of'
        " short_factor, for 4 of a head; correct the file",
    ),
    "a factor of positions without their kind": (
        keys(rope_scaling={"factor": 2.0}),
        'models[0].path: {m}/config.json has rope_scaling {{"factor": 2.0}}, which is not an object'
        " with a rope_type of ...",
    ),
    "an original length that is text": (
        keys(rope_scaling={**LLAMA3, "original_max_position_embeddings": "8192"}),
        'models[0].path: {m}/config.json has rope_scaling {{"rope_type": "llama3", "factor": 8.0,'
        ' "low_freq_factor": 1., which is not an object with a positive'
        " original_max_position_embeddings; correct the file",
    ),
    "sections of positions that are text": (
        keys(rope_scaling={"rope_type": "mrope", "mrope_section": "all"}),
        'models[0].path: {m}/config.json has rope_scaling {{"rope_type": "mrope", "mrope_section":'
        ' "all"}}, which is not an object with an mrope_section of whole numbers; correct the file',
    ),
    "positions of more than a head": (
        keys(partial_rotary_factor=1.5),
        "models[0].path: {m}/config.json has partial_rotary_factor 1.5, which is not a number above"
        " 0, up to 1; correct the file",
    ),
    "positions that are text": (
        keys(rope_scaling="linear"),
        'models[0].path: {m}/config.json has rope_scaling "linear", which is not an object;'
        " correct the file",
    ),
    "a rope_theta of 0": (
        keys(rope_theta=0),
        "models[0].path: {m}/config.json has rope_theta 0, which is not a positive number;"
        " correct the file",
    ),
}
