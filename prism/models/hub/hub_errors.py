"""Errors of huggingface_hub as lines that name what to change, without tokens and signed URLs."""

from __future__ import annotations

import errno
import re
from json import JSONDecodeError

import httpx
from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RevisionNotFoundError,
)

from prism.errors import ConfigError, ModelSourceError, PrismError
from prism.models.hub.hub_model import joined

_NOT_A_HUB = (FileMetadataError, httpx.InvalidURL, JSONDecodeError, KeyError, TypeError)
# RuntimeError: of hf_xet.
FAILURES = (httpx.HTTPError, OSError, ValueError, RuntimeError, *_NOT_A_HUB)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def endpoint() -> str:
    """Returns the hub's URL, without a password."""
    return re.sub(r"//[^/]*@", "//", constants.ENDPOINT)


def refusal(error: BaseException, repo: str, revision: str | None) -> PrismError:
    """Returns the error for users. It is a ConfigError if the name or a variable must be
    changed."""
    while isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    name = joined(repo, revision)
    if isinstance(error, HfHubHTTPError):
        return _answered(error, repo, revision)
    if isinstance(error, HFValidationError):
        return ConfigError(f"{name} is not a valid name of a model; correct it")
    if isinstance(error, UnicodeEncodeError):
        return ConfigError("HF_TOKEN has characters that no token has; correct it")
    if isinstance(error, _NOT_A_HUB):
        return ConfigError(f"{endpoint()} does not answer as a model hub; correct HF_ENDPOINT")
    return ModelSourceError(f"{name}: {_failed(error)}")


def _failed(error: BaseException) -> str:
    """Returns the failure of the network or the disk, and its remedy."""
    if isinstance(error, httpx.TransportError):
        remedy = "check the network, HF_ENDPOINT and HTTPS_PROXY"
        return f"cannot reach {endpoint()}: {_plain(error)}; {remedy}"
    remedy = "set HF_HOME to a folder on another disk"
    if getattr(error, "errno", None) in _FULL or "No space left" in str(error):
        return f"{constants.HF_HUB_CACHE} is full; free some space, or {remedy}"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; correct the folder, or {remedy}"
    return f"the download failed: {_plain(error)}; try again"


def _answered(error: HfHubHTTPError, repo: str, revision: str | None) -> PrismError:
    """Returns the error for an answer of the hub."""
    status, page = error.response.status_code, f"{endpoint()}/{repo}"
    if isinstance(error, GatedRepoError):
        return ConfigError(
            f"{repo} is gated; accept its licence at {page}, and set HF_TOKEN to a token of that"
            " account"
        )
    if isinstance(error, RevisionNotFoundError):
        return ConfigError(
            f"{repo} does not have the revision {revision}; correct the part after @, or leave it"
            " out"
        )
    if status == 401 and get_token() is not None:
        return ConfigError(f"{endpoint()} rejects the token (401); set HF_TOKEN to a valid one")
    if status == 403:
        return ConfigError(
            f"{repo} may not be read (403); ask for access at {page}, and set HF_TOKEN to a token"
            " of that account"
        )
    if status in (401, 404):
        return ConfigError(
            f"{endpoint()} does not have {repo}, or it is private; correct the name, or set"
            " HF_TOKEN to a token that may read it"
        )
    return ModelSourceError(f"{repo}: {endpoint()} answered {status}; try again later")


def _plain(error: BaseException) -> str:
    """Returns an error's text in one line, without the queries of URLs and the token."""
    text = re.sub(r"\?\S+", "", " ".join(str(error).split())) or type(error).__name__
    return text.replace(get_token() or "\n", "***")[:200]
