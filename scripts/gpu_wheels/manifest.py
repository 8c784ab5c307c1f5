"""List of the carried wheels, and whether they fit."""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NAME = "manifest.json"
COMPILED = "compiled.tgz"  # kernels that scripts/gpu-day brought back from a GPU machine
SOURCES = ("csrc", "kvcached", "kvcached_plugins", "prism")


class TooLarge(RuntimeError):
    """Error for wheels and a checkout that exceed what can be carried."""


@dataclass(frozen=True)
class FileFacts:
    """File with the facts to recognise it."""

    name: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileFacts:
        content = path.read_bytes()
        return cls(path.name, len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class Entry:
    """Wheel that is carried."""

    name: str
    version: str
    file: FileFacts
    source: FileFacts | None = None  # the wheel of the index; None: made from this checkout
    dropped_bytes: dict[str, int] = field(default_factory=dict)  # why -> compressed size


def write(
    out: Path, entries: list[Entry], python: str, root: Path, limit_bytes: int
) -> dict[str, Any]:
    """Writes manifest.json to the folder of the wheels and returns it. Raises TooLarge."""
    made: dict[str, Any] = {
        "python": python,
        "sources": digest_of_sources(root),
        **total(entries, checkout_bytes(root), limit_bytes),
        "wheels": [asdict(entry) for entry in entries],
    }
    (out / NAME).write_text(json.dumps(made, indent=2) + "\n")
    if made["left_bytes"] < 0:
        largest = sorted(entries, key=lambda entry: -entry.file.bytes)[:3]
        raise TooLarge(
            f"{mb(made['wheels_bytes'])} of wheels and {mb(made['checkout_bytes'])} of checkout are"
            f" {mb(-made['left_bytes'])} over {mb(limit_bytes)}; the largest wheels: "
            + ", ".join(f"{entry.name} {mb(entry.file.bytes)}" for entry in largest)
        )
    return made


def digest_of_sources(root: Path) -> str:
    """Returns a name for the state of kvcached's and prism's sources, with or without git."""
    digest = hashlib.sha256()
    for path in (root / "CMakeLists.txt", root / "pyproject.toml", *_sources(root)):
        if path.exists():
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _sources(root: Path) -> list[Path]:
    files = (path for folder in SOURCES for path in (root / folder).rglob("*"))
    return sorted(p for p in files if p.is_file() and "__pycache__" not in p.parts)


def total(entries: list[Entry], checkout: int, limit_bytes: int) -> dict[str, int]:
    """Returns the sums. `left_bytes` is negative if they exceed the limit."""
    wheels = sum(entry.file.bytes for entry in entries)
    return {
        "limit_bytes": limit_bytes,
        "checkout_bytes": checkout,
        "wheels_bytes": wheels,
        "left_bytes": limit_bytes - checkout - wheels,
    }


def checkout_bytes(root: Path) -> int:
    """Returns the bytes of the files that git tracks or would track, which are carried."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=root, capture_output=True, check=True
    ).stdout
    paths = (root / name.decode() for name in listed.split(b"\0") if name)
    return sum(path.lstat().st_size for path in paths if path.is_symlink() or path.exists())


def describe(made: dict[str, Any]) -> str:
    """Returns the sums on one line."""
    return (
        f"{len(made['wheels'])} files, {mb(made['wheels_bytes'])}, with the checkout's"
        f" {mb(made['checkout_bytes'])} they leave {mb(made['left_bytes'])}"
        f" of {mb(made['limit_bytes'])}"
    )


def mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f} MB"
