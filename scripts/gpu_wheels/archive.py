"""Writer of wheels (PEP 427) whose bytes depend on their contents alone."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Collection
from pathlib import Path

LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip file can hold
FILE_MODE, PROGRAM_MODE = 0o100644, 0o100755


def write_wheel(
    path: Path, files: dict[str, bytes], info: str, programs: Collection[str] = ()
) -> None:
    """Writes a wheel of `files`. Those in `programs` are executable.

    `info` is the name of the folder of metadata, to which RECORD is added last.
    """
    record = f"{info}/RECORD"
    ordered = sorted(files, key=lambda name: (name.startswith(f"{info}/"), name))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in ordered:
            mode = PROGRAM_MODE if name in programs else FILE_MODE
            _add(archive, name, files[name], mode)
        _add(archive, record, _record(files, ordered, record), FILE_MODE)


def _add(archive: zipfile.ZipFile, name: str, content: bytes, mode: int) -> None:
    entry = zipfile.ZipInfo(name, LONG_AGO)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = mode << 16
    archive.writestr(entry, content, compresslevel=9)


def _record(files: dict[str, bytes], ordered: list[str], record: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name in ordered:
        writer.writerow((name, f"sha256={_digest(files[name])}", len(files[name])))
    writer.writerow((record, "", ""))
    return text.getvalue().encode()


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
