"""Import of SGLang's modules that parse answers, without the rest of the package.

The import of the whole package, with torch, takes 6 s and 400 MB. A frontend does not need it:
these modules are imported below empty packages, with stand-ins for the few names that they only
refer to.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import threading
import types
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from prism.models.weight_names import package_folder

# Loggers that would log answers.
_VERBOSE_LOGGERS = ("sglang.srt.function_call", "sglang.srt.parser")
_importing = threading.Lock()


def library() -> types.SimpleNamespace:
    """Returns SGLang's modules, which the first call imports. May be called from any thread."""
    with _importing:
        return _imported()


@lru_cache(maxsize=1)
def _imported() -> types.SimpleNamespace:
    """Imports the modules, or returns those of the whole package if it is already imported."""
    for name in _VERBOSE_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    stand_ins = {} if "sglang" in sys.modules else _stand_ins()
    sys.modules.update(stand_ins)
    try:
        names = {
            "calls": "sglang.srt.function_call.function_call_parser",
            "array_parser": "sglang.srt.function_call.json_array_parser",
            "protocol": "sglang.srt.entrypoints.openai.protocol",
            "reasoning": "sglang.srt.parser.reasoning_parser",
            "detection": "sglang.srt.parser.template_detection",
        }
        return types.SimpleNamespace(**{k: importlib.import_module(n) for k, n in names.items()})
    finally:
        # Other code may import these packages in full; only SGLang's stand-ins remain.
        for name in stand_ins:
            if not name.startswith("sglang"):
                sys.modules.pop(name, None)


def _stand_ins() -> dict[str, types.ModuleType]:
    package = _empty("sglang", [str(package_folder("sglang"))])
    xgrammar = _empty("xgrammar", [str(package_folder("xgrammar"))])
    sys.modules["xgrammar"] = xgrammar
    try:
        tags = importlib.import_module("xgrammar.structural_tag")
        models = importlib.import_module("xgrammar.builtin_structural_tag")
    finally:
        del sys.modules["xgrammar"]
    xgrammar.__dict__["StructuralTag"] = tags.StructuralTag
    xgrammar.__dict__["get_model_structural_tag"] = models.get_model_structural_tag
    groups = "sglang.srt.arg_groups"
    overrides = {"declare_resolution": None, "resolving_view": None}
    hook = {"muse_spark_chat_template_default": None}
    return {
        "sglang": package,
        "xgrammar": xgrammar,
        "transformers": _empty("transformers", [], PreTrainedTokenizerBase=object),
        "sglang.utils": _empty("sglang.utils", [], convert_json_schema_to_str=_schema_text),
        groups: _empty(groups, []),
        f"{groups}.overrides": _empty(f"{groups}.overrides", [], **overrides),
        f"{groups}.muse_spark_hook": _empty(f"{groups}.muse_spark_hook", [], **hook),
    }


def _empty(name: str, path: Sequence[str], **names: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = list(path)
    module.__dict__.update(names)
    return module


def _schema_text(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)
