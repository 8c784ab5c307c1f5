"""Models and LoRA adapters by a hub's name: ORG/NAME, or ORG/NAME@REVISION with a branch, tag or
commit. A model in GGUF is ORG/NAME/FILE.gguf or ORG/NAME:TYPE, as for SGLang and llama.cpp.

huggingface_hub downloads and keeps them, in its cache and by its variables (HF_HOME, HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE). SGLANG_USE_MODELSCOPE selects ModelScope's package, as in SGLang.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from prism.errors import ConfigError, NotDownloadedError
from prism.models.lora_files import CONFIG, WEIGHTS

Say = Callable[[str], None]

# The files that an engine needs: configuration, tokenizer, chat template, weights or an adapter.
WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
# The weights again, in other formats.
IGNORED = ["*/*.safetensors", "consolidated*", "original/*", "onnx/*"]

_PART = r"\w[\w.-]*"
_REVISION = rf"(?:@(?P<revision>{_PART}(?:/{_PART})*))?"
_FILE = rf"(?:/(?P<file>(?:{_PART}/)*{_PART}\.gguf)|:(?P<type>{_PART}))?"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART}){_FILE}{_REVISION}", re.ASCII)
_SPLIT = re.compile(r".*-\d{5}-of-\d{5}\.gguf")
# Weights that are not served, by the ends of their files' names.
_OTHER_FORMATS = {".bin": "PyTorch's .bin", ".pt": ".pt", ".pth": ".pth"}


class HubName(NamedTuple):
    """Parts of a hub's name."""

    repo: str
    revision: str | None = None
    # Path of a GGUF file in the repository, or a pattern of it. "" for other formats.
    file: str = ""

    @property
    def wanted(self) -> list[str]:
        """Patterns of the files that an engine needs."""
        others = [each for each in WANTED if each != "*.safetensors"]
        return [*others, self.file] if self.file else WANTED

    def found_in(self, files: Iterable[str]) -> list[str]:
        """Returns the GGUF files that the name may mean."""
        return sorted(each for each in files if fnmatchcase(each, self.file))


def split_name(text: str) -> HubName | None:
    """Returns the parts of a hub's name, or None if `text` is not one."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    file = match["file"] or (f"*-{match['type']}.gguf" if match["type"] else "")
    return HubName(match["repo"], match["revision"], file)


def cached(name: str) -> Path:
    """Returns the folder, or the file in GGUF, of a model that was downloaded before, without a
    request to the hub. Raises NotDownloadedError if it is not there, or is incomplete."""
    hub_name = _checked(name)
    if _is_modelscope():
        from prism.models.hub import model_scope

        return _whole(model_scope.cached(hub_name), hub_name, name)
    from prism.models.hub import snapshots

    return _whole(snapshots.cached(hub_name), hub_name, name)


def fetched(name: str, say: Say) -> Path:
    """Returns the folder or file of a model, which is downloaded if it was not before.

    A model that was downloaded is not compared with the hub, so that a restart without a network
    serves the same files. Raises ConfigError or ModelSourceError.
    """
    try:
        return cached(name)
    except NotDownloadedError:
        return pulled(name, say)


def pulled(name: str, say: Say) -> Path:
    """Downloads what is missing of a revision's present commit. Returns the folder or file.

    Raises ConfigError if the name or a variable must be changed, ModelSourceError for a failure of
    the network, the hub or the disk. Main thread only: it handles signals meanwhile.

    Args:
        name: Name of the model.
        say: Prints a line.
    """
    hub_name = _checked(name)
    if _is_modelscope():
        from prism.models.hub import model_scope

        return _whole(model_scope.download(hub_name), hub_name, name)
    from prism.models.hub import snapshots

    return _whole(snapshots.download(hub_name, say), hub_name, name)


def check_format(files: Iterable[str], where: str) -> None:
    """Raises ConfigError if the files have weights in a format that is not served, and none in
    safetensors."""
    suffixes = {Path(file).suffix for file in files}
    found = [form for suffix, form in _OTHER_FORMATS.items() if suffix in suffixes]
    if found and suffixes.isdisjoint((".safetensors", ".gguf")):
        raise ConfigError(
            f"{where} has its weights as {found[0]}, which is not served; give a model with"
            " *.safetensors"
        )


def joined(repo: str, revision: str | None, file: str = "") -> str:
    """Returns the name of a repository at a revision, or of a GGUF file there."""
    is_type = file.startswith("*")
    named = f":{file[2:-5]}" if is_type else f"/{file}" if file else ""
    return f"{repo}{named}" if revision is None else f"{repo}{named}@{revision}"


def _checked(name: str) -> HubName:
    parts = split_name(name)
    if parts is None:
        raise ConfigError(
            f"{name!r} is not a hub's name; write ORG/NAME or ORG/NAME@REVISION, such as"
            " Qwen/Qwen3-0.6B"
        )
    if parts.repo.endswith(".gguf"):
        raise ConfigError(f"{name} does not have a repository; write ORG/NAME/FILE.gguf")
    if _SPLIT.fullmatch(parts.file):
        raise ConfigError(f"{name} is a part of a model; give a model in one file")
    return parts


def _is_modelscope() -> bool:
    return os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("true", "1", "yes", "y")


def _whole(folder: Path, hub_name: HubName, name: str) -> Path:
    """Returns `folder`, or the file in it that the name means. Raises NotDownloadedError if the
    configuration or weights of a model, or of an adapter, are missing or cut."""
    if hub_name.file:
        files = hub_name.found_in(str(each.relative_to(folder)) for each in folder.rglob("*.gguf"))
        if len(files) == 1:
            return folder / files[0]
        raise NotDownloadedError(
            f"{name} is not in {folder}; run prism-models pull {name}"
            if not files
            else f"{name} may be {' or '.join(files)}; write ORG/NAME/FILE.gguf"
        )
    is_adapter = {each.name for each in folder.glob("*.safetensors")} <= {WEIGHTS}
    is_adapter &= (folder / CONFIG).is_file()
    if problem := _lack_of_adapter(folder) if is_adapter else _lack_of_model(folder):
        raise NotDownloadedError(
            f"{name} is incomplete: {problem}; remove damaged files, and run prism-models pull"
            f" {name}"
        )
    return folder


def _lack_of_model(folder: Path) -> str:
    from kvcached import Checkpoint
    from kvcached.errors import WeightFileError

    try:
        Checkpoint.open(folder)
    except WeightFileError as error:
        return str(error)
    return "" if (folder / "config.json").is_file() else f"{folder} does not have config.json"


def _lack_of_adapter(folder: Path) -> str:
    try:
        with safe_open(folder / WEIGHTS, framework="np"):
            return ""
    except (SafetensorError, OSError) as error:
        return f"cannot read {folder / WEIGHTS}: {error}"
