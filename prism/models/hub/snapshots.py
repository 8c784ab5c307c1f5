"""Snapshots of Hugging Face's hub in the cache of huggingface_hub."""

from __future__ import annotations

import logging
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import (
    CacheNotFound,
    HfApi,
    constants,
    scan_cache_dir,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from huggingface_hub.utils import logging as hub_logging

from prism.errors import ConfigError, ModelSourceError, NotDownloadedError
from prism.models.hub.download_progress import ends_at_once, lines, shown
from prism.models.hub.hub_errors import FAILURES, endpoint, refusal
from prism.models.hub.hub_model import IGNORED, HubName, Say, check_format, joined


def cached(hub_name: HubName) -> Path:
    """Returns the folder of a revision in the cache. Raises NotDownloadedError."""
    repo, revision, file = hub_name
    try:
        found = snapshot_download(
            repo,
            revision=revision,
            local_files_only=True,
            allow_patterns=hub_name.wanted,
            ignore_patterns=IGNORED,
        )
    except LocalEntryNotFoundError as error:
        lacks = "is incomplete" if isinstance(error, IncompleteSnapshotError) else "is not"
        offline = "unset HF_HUB_OFFLINE and " if constants.HF_HUB_OFFLINE else ""
        name = joined(repo, revision, file)
        raise NotDownloadedError(
            f"{name} {lacks} in the cache {constants.HF_HUB_CACHE}; {offline}run prism-models"
            f" pull {name}"
        ) from error
    return Path(found)


def names_in_cache() -> list[str]:
    """Returns the names of the models in the cache, also of incomplete ones."""
    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return []
    return sorted(repo.repo_id for repo in found.repos if repo.repo_type == "model")


def download(hub_name: HubName, say: Say) -> Path:
    """Downloads the files of a revision that the cache does not have. Returns the folder. With
    HF_HUB_OFFLINE, returns that in the cache. Raises ConfigError or ModelSourceError."""
    if constants.HF_HUB_OFFLINE:
        return cached(hub_name)
    repo, revision, _ = hub_name
    with _quiet(), ends_at_once():
        try:
            total_bytes = _prepare(hub_name, say)
            bars = None if sys.stderr.isatty() else lines(joined(*hub_name), total_bytes, say)
            found = snapshot_download(
                repo,
                revision=revision,
                allow_patterns=hub_name.wanted,
                ignore_patterns=IGNORED,
                tqdm_class=bars,
            )
        except FAILURES as error:
            raise refusal(error, repo, revision) from error
    return Path(found)


def _prepare(hub_name: HubName, say: Say) -> int:
    """Checks the files' formats and the room for them, and says what is downloaded. Returns its
    bytes."""
    repo, revision, _ = hub_name
    name, cache = joined(*hub_name), Path(constants.HF_HUB_CACHE)
    info = HfApi().model_info(
        repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
    )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    wanted = list(
        filter_repo_objects(sizes, allow_patterns=hub_name.wanted, ignore_patterns=IGNORED)
    )
    _check_files(sizes, wanted, hub_name)
    present = (try_to_load_from_cache(repo, file, revision=info.sha) for file in wanted)
    absent = [file for file, path in zip(wanted, present, strict=True) if not isinstance(path, str)]
    total_bytes = sum(sizes[file] for file in absent)
    free_bytes = shutil.disk_usage(_existing(cache)).free
    if total_bytes > free_bytes:
        raise ModelSourceError(
            f"{name} needs {shown(total_bytes)}, and {shown(free_bytes)} are free in {cache}; free"
            " some space, or set HF_HOME to a folder on another disk"
        )
    if absent:
        what = f"{shown(total_bytes)} in {len(absent)} file{'s' * (len(absent) != 1)}"
        say(f"{name}: downloading {what} from {endpoint()} to {cache}")
    return total_bytes


def _check_files(files: Iterable[str], wanted: Sequence[str], hub_name: HubName) -> None:
    """Raises ConfigError if a repository does not have what an engine needs."""
    name, in_gguf = (
        joined(hub_name.repo, hub_name.revision),
        [f for f in files if f[-5:] == ".gguf"],
    )
    if hub_name.file:
        if len(hub_name.found_in(wanted)) != 1:
            raise ConfigError(f"{name} does not have one {hub_name.file}; {_named(in_gguf)}")
        return
    if in_gguf and not any(file.endswith(".safetensors") for file in files):
        raise ConfigError(f"{name} has its weights in GGUF; {_named(in_gguf)}")
    if not any(file.endswith(".safetensors") for file in wanted):
        check_format((file for file in files if not file.endswith(".safetensors")), name)
    for part in ("config.json", ".safetensors"):
        if not any(file.endswith(part) for file in wanted):
            raise ConfigError(
                f"{name} does not have {part}; give a model in the format of transformers"
            )


def _named(files: Sequence[str]) -> str:
    shown = ", ".join(files[:5]) + (f" or one of {len(files) - 5} more" if len(files) > 5 else "")
    return f"give ORG/NAME/FILE.gguf, with one of its files: {shown or 'none'}"


def _existing(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.exists())


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses warnings of huggingface_hub within the block: they have several lines, and the
    signed URLs of files."""
    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hub_logging.set_verbosity(before)
