"""Snapshots of Hugging Face's hub in the cache of huggingface_hub."""

from __future__ import annotations

import logging
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from huggingface_hub.utils import logging as hub_logging

from prism.errors import ConfigError, ModelSourceError, NotDownloadedError
from prism.models.hub.download_progress import ends_at_once, lines, shown
from prism.models.hub.hub_errors import FAILURES, endpoint, refusal
from prism.models.hub.hub_model import IGNORED, WANTED, Say, check_format, joined


def cached(repo: str, revision: str | None) -> Path:
    """Returns the folder of a revision in the cache. Raises NotDownloadedError."""
    try:
        found = snapshot_download(
            repo,
            revision=revision,
            local_files_only=True,
            allow_patterns=WANTED,
            ignore_patterns=IGNORED,
        )
    except LocalEntryNotFoundError as error:
        lacks = "is incomplete" if isinstance(error, IncompleteSnapshotError) else "is not"
        offline = "unset HF_HUB_OFFLINE and " if constants.HF_HUB_OFFLINE else ""
        name = joined(repo, revision)
        raise NotDownloadedError(
            f"{name} {lacks} in the cache {constants.HF_HUB_CACHE}; {offline}run prism-models"
            f" pull {name}"
        ) from error
    return Path(found)


def download(repo: str, revision: str | None, say: Say) -> Path:
    """Downloads the files of a revision that the cache does not have. Returns the folder. With
    HF_HUB_OFFLINE, returns that in the cache. Raises ConfigError or ModelSourceError."""
    if constants.HF_HUB_OFFLINE:
        return cached(repo, revision)
    with _quiet(), ends_at_once():
        try:
            total_bytes = _prepare(repo, revision, say)
            bars = None if sys.stderr.isatty() else lines(joined(repo, revision), total_bytes, say)
            found = snapshot_download(
                repo,
                revision=revision,
                allow_patterns=WANTED,
                ignore_patterns=IGNORED,
                tqdm_class=bars,
            )
        except FAILURES as error:
            raise refusal(error, repo, revision) from error
    return Path(found)


def _prepare(repo: str, revision: str | None, say: Say) -> int:
    """Checks the files' formats and the room for them, and says what is downloaded. Returns its
    bytes."""
    name, cache = joined(repo, revision), Path(constants.HF_HUB_CACHE)
    info = HfApi().model_info(
        repo, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
    )
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    wanted = list(filter_repo_objects(sizes, allow_patterns=WANTED, ignore_patterns=IGNORED))
    _check_files(sizes, wanted, name)
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


def _check_files(files: Iterable[str], wanted: Sequence[str], name: str) -> None:
    """Raises ConfigError if a repository does not have what an engine needs."""
    if not any(file.endswith(".safetensors") for file in wanted):
        check_format((file for file in files if not file.endswith(".safetensors")), name)
    for part in ("config.json", ".safetensors"):
        if not any(file.endswith(part) for file in wanted):
            raise ConfigError(
                f"{name} does not have {part}; give a model in the format of transformers"
            )


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
