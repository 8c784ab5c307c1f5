"""Wheels without the files that a machine for checks does not need.

The result is a valid wheel of the same name and version. A build tag marks it.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

from scripts.gpu_wheels.archive import write_wheel
from scripts.gpu_wheels.manifest import Entry, FileFacts
from scripts.gpu_wheels.rules import Rule, rules_for

BUILD_TAG = "0prism"
EXECUTABLE = 0o111


def strip(wheel: Path, out: Path) -> Entry:
    """Writes the stripped wheel into the folder `out`. The same wheel gives the same bytes."""
    distribution, version, tags = parts_of(wheel.name)
    rules = rules_for(distribution)
    kept: dict[str, bytes] = {}
    programs = set[str]()
    dropped: Counter[str] = Counter()
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            rule = first_match(info.filename, rules)
            if rule is None:
                kept[info.filename] = archive.read(info)
                programs |= {info.filename} if info.external_attr >> 16 & EXECUTABLE else set()
            else:
                dropped[rule.why] += info.compress_size
    made = out / f"{distribution}-{version}-{BUILD_TAG}-{tags}.whl"
    write_wheel(made, kept, f"{distribution}-{version}.dist-info", programs)
    return Entry(
        name=distribution,
        version=version,
        file=FileFacts.of(made),
        source=FileFacts.of(wheel),
        dropped_bytes=dict(sorted(dropped.items())),
    )


def first_match(path: str, rules: tuple[Rule, ...]) -> Rule | None:
    return next((rule for rule in rules if fnmatchcase(path, rule.pattern)), None)


def parts_of(name: str) -> tuple[str, str, str]:
    """Returns (distribution, version, "python-abi-platform") of a wheel's file name."""
    fields = name.removesuffix(".whl").split("-")
    if len(fields) not in (5, 6):
        raise ValueError(f"{name} is not the name of a wheel")
    return fields[0], fields[1], "-".join(fields[-3:])
