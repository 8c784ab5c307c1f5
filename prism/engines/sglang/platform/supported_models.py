"""Models that the installed SGLang supports.

The module reads SGLang's source files, since importing them takes seconds.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path


def refuses(model: Path, embeds: bool = False) -> str:
    """Returns the reason why SGLang cannot serve the checkpoint in this folder, "" if none is
    known."""
    if find_spec("sglang") is None or find_spec("transformers") is None:
        return ""
    config = json.loads((model / "config.json").read_text())
    kind, architecture = str(config.get("model_type")), str(config["architectures"][0])
    named = rf"""["']{re.escape(kind)}["']"""
    as_key, as_field = rf"""{named}\s*[:,]\s*["']\w+Config""", rf"model_type(: str)? = {named}"
    if not _found(f"{as_key}|{as_field}", _configurations()):
        return (
            f"{model}/config.json has model_type {kind!r}, which the installed SGLang and"
            " transformers do not know; correct it or upgrade them"
        )
    if not _found(rf"""(\bclass |["']){re.escape(architecture)}\b""", _models()):
        return (
            f"{model}/config.json names {architecture}, which the installed SGLang cannot serve;"
            " give another model or upgrade it"
        )
    if embeds and not _can_embed(architecture):
        return (
            f"{model}/config.json names {architecture}, for which SGLang makes no embeddings; give"
            " another model or set embeddings: false"
        )
    return ""


def parser_names() -> dict[str, list[str]]:
    """Returns the valid values of a model's parser keys in the YAML, without keys whose values are
    not known."""
    if find_spec("sglang") is None:
        return {}
    folder = package_folder("sglang") / "srt"
    files = {
        "tool_parser": folder / "function_call" / "parser_names.py",
        "reasoning_parser": folder / "parser" / "reasoning_parser_names.py",
    }
    return {key: _names_in(file) for key, file in files.items() if file.exists()}


def _names_in(file: Path) -> list[str]:
    """Returns the names in a module that only assigns lists of names."""
    assigned = (each for each in ast.parse(file.read_text()).body if isinstance(each, ast.Assign))
    return sorted(name for each in assigned for name in ast.literal_eval(each.value))


def _can_embed(architecture: str) -> bool:
    """Returns whether the model class, or a base class, can return an embedding of the last token.
    Classes that only transformers implements always can."""
    texts = [file.read_text(errors="replace") for file in _own_models()]
    seen, names = set[str](), [architecture]
    while names:
        name = names.pop()
        found = re.compile(
            rf"^class {re.escape(name)}\b\(?([^)]*)\)?:\n(.*?)(?=^\S|\Z)", re.M | re.S
        )
        for text in texts if name not in seen else ():
            for bases, body in found.findall(text):
                if "get_embedding" in body:
                    return True
                names += re.findall(r"\w+", bases)
        seen.add(name)
    named = re.compile(rf"""(\bclass |["']){re.escape(architecture)}\b""")
    return not any(named.search(text) for text in texts)


def _configurations() -> Iterator[Path]:
    auto = package_folder("transformers") / "models" / "auto"
    yield from (auto / "auto_mappings.py", auto / "configuration_auto.py")
    yield from (package_folder("sglang") / "srt" / "configs").glob("*.py")


def _models() -> Iterator[Path]:
    """Yields the files that name models: SGLang's own, and transformers' list, since SGLang also
    serves these."""
    yield from _own_models()
    yield package_folder("transformers") / "models" / "auto" / "modeling_auto.py"


def _own_models() -> Iterator[Path]:
    yield from (package_folder("sglang") / "srt" / "models").glob("*.py")


def _found(pattern: str, files: Iterator[Path]) -> bool:
    wanted = re.compile(pattern)
    return any(wanted.search(file.read_text(errors="replace")) for file in files if file.exists())


def package_folder(name: str) -> Path:
    """Returns the folder of an installed package. Raises ModuleNotFoundError."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{name} is not installed: install the engine's requirements")
    return Path(spec.submodule_search_locations[0])
