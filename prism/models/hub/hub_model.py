"""Models and LoRA adapters by a hub's name: ORG/NAME, or ORG/NAME@REVISION with a branch, tag or
commit.

huggingface_hub downloads and keeps them, in its cache and by its variables (HF_HOME, HF_TOKEN,
HF_ENDPOINT, HF_HUB_OFFLINE). SGLANG_USE_MODELSCOPE selects ModelScope's package, as in SGLang.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from prism.errors import ConfigError, NotDownloadedError
from prism.models.lora_files import CONFIG, WEIGHTS

Say = Callable[[str], None]

# The files that an engine needs: configuration, tokenizer, chat template, weights or an adapter.
WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
# The weights again, in other formats.
IGNORED = ["*/*.safetensors", "consolidated*", "original/*", "onnx/*"]

_PART = r"\w[\w.-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@({_PART}(?:/{_PART})*))?", re.ASCII)
# Weights that are not served, by the ends of their files' names.
_OTHER_FORMATS = {".gguf": "GGUF", ".bin": "PyTorch's .bin", ".pt": ".pt", ".pth": ".pth"}


def split_name(text: str) -> tuple[str, str | None] | None:
    """Returns the repository and the revision of a hub's name, or None if `text` is not one."""
    match = _NAME.fullmatch(text)
    return None if match is None else (match[1], match[2])


def cached(name: str) -> Path:
    """Returns the folder of a model that was downloaded before, without a request to the hub.
    Raises NotDownloadedError if it is not there, or is incomplete."""
    repo, revision = _checked(name)
    if _is_modelscope():
        from prism.models.hub import model_scope

        return _whole(model_scope.cached(repo, revision), name)
    from prism.models.hub import snapshots

    return _whole(snapshots.cached(repo, revision), name)


def fetched(name: str, say: Say) -> Path:
    """Returns the folder of a model, which is downloaded if it was not before.

    A model that was downloaded is not compared with the hub, so that a restart without a network
    serves the same files. Raises ConfigError or ModelSourceError.
    """
    try:
        return cached(name)
    except NotDownloadedError:
        return pulled(name, say)


def pulled(name: str, say: Say) -> Path:
    """Downloads what is missing of a revision's present commit. Returns the folder.

    Raises ConfigError if the name or a variable must be changed, ModelSourceError for a failure of
    the network, the hub or the disk. Main thread only: it handles signals meanwhile.

    Args:
        name: Name of the model.
        say: Prints a line.
    """
    repo, revision = _checked(name)
    if _is_modelscope():
        from prism.models.hub import model_scope

        return _whole(model_scope.download(repo, revision), name)
    from prism.models.hub import snapshots

    return _whole(snapshots.download(repo, revision, say), name)


def check_format(files: Iterable[str], where: str) -> None:
    """Raises ConfigError if the files have weights in a format that is not served, and none in
    safetensors."""
    suffixes = {Path(file).suffix for file in files}
    found = [form for suffix, form in _OTHER_FORMATS.items() if suffix in suffixes]
    if found and ".safetensors" not in suffixes:
        raise ConfigError(
            f"{where} has its weights as {found[0]}, which is not served; give a model with"
            " *.safetensors"
        )


def joined(repo: str, revision: str | None) -> str:
    """Returns the name of a repository at a revision."""
    return repo if revision is None else f"{repo}@{revision}"


def _checked(name: str) -> tuple[str, str | None]:
    parts = split_name(name)
    if parts is None:
        raise ConfigError(
            f"{name!r} is not a hub's name; write ORG/NAME or ORG/NAME@REVISION, such as"
            " Qwen/Qwen3-0.6B"
        )
    if parts[0].endswith(".gguf"):
        raise ConfigError(f"{name} is a GGUF file, which is not served; give *.safetensors")
    return parts


def _is_modelscope() -> bool:
    return os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("true", "1", "yes", "y")


def _whole(folder: Path, name: str) -> Path:
    """Returns `folder`. Raises NotDownloadedError if the configuration or weights of a model, or of
    an adapter, are missing or cut."""
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
