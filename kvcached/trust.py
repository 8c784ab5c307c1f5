"""Whether a folder is this user's alone to change."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def distrust(folder: Path) -> str:
    """Why another user may have put there what lies in it, or may yet; "" where none can. Ends a
    sentence that begins with the folder's name. Raises OSError where there is none."""
    found = folder.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "is a link"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.geteuid():
        return f"belongs to another user (uid {found.st_uid})"
    if found.st_mode & stat.S_IWOTH:
        return "may be changed by every user"
    return ""
