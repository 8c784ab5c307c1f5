"""Names of a layer's weights that loaders know, read from the source files of model classes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

# Modules and parameters that a class sets, and texts by which its loader renames weights.
_WORDS = re.compile(r"""\bself\.(\w+)\s*[:=]|["']([\w.]+)["']""")
# Last parts of names that every module has.
_COMMON = frozenset({"weight", "bias"})


def model_files(files: Iterable[Path], kind: str, architecture: str) -> Iterator[Path]:
    """Yields those of an engine's `files` that have the class of a model or a base of it, and
    transformers' of the family `kind`."""
    yield from (file for file, _, _ in class_sources(files, architecture))
    for folder in {kind, kind.removesuffix("_text")}:
        yield from (package_folder("transformers") / "models" / folder).glob("modeling_*.py")


def class_sources(files: Iterable[Path], architecture: str) -> Iterator[tuple[Path, str, str]]:
    """Yields the file, its text and the body of a model's class in `files`, and those of its base
    classes."""
    texts = {file: file.read_text(errors="replace") for file in files}
    names = [architecture]
    for name in names:  # which grows
        of_class = re.compile(
            rf"^class {re.escape(name)}\b\(?([^)]*)\)?:\n(.*?)(?=^\S|\Z)", re.M | re.S
        )
        for file, text in texts.items():
            for bases, body in of_class.findall(text):
                names += [base for base in re.findall(r"\w+", bases) if base not in names]
                yield file, text, body


def package_folder(name: str) -> Path:
    """Returns the folder of an installed package. Raises ModuleNotFoundError."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{name} is not installed: install the engine's requirements")
    return Path(spec.submodule_search_locations[0])


def words_of(files: Iterable[Path]) -> frozenset[str]:
    """Returns the parts of weights' names that these source files contain."""
    found = (match for file in files for match in _WORDS.findall(file.read_text(errors="replace")))
    return frozenset(word for names in found for name in names for word in name.split("."))


def is_known(name: str, words: Collection[str]) -> bool:
    """Returns whether a loader with these words may know a weight, by its name in a layer."""
    return all(part in words or part in _COMMON or part.isdigit() for part in name.split("."))
