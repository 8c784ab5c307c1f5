"""Checks that a folder can be modified by this user alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def untrusted_reason(folder: Path) -> str:
    """Returns why the folder could be modified by another user, or an empty string.

    The text continues a sentence that begins with the folder's name. Raises OSError if the folder
    does not exist.
    """
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.geteuid():
        return f"belongs to another user (uid {found.st_uid})"
    if found.st_mode & stat.S_IWOTH:
        return "can be modified by every user"
    return ""
