"""The wheel of the stand-in for SGLang's compiled kernels.

It has the real distribution's name, so that pip replaces one by the other, and a version lower
than all real ones.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from scripts.gpu_wheels.archive import write_wheel
from scripts.gpu_wheels.manifest import Entry, FileFacts

SOURCE = Path(__file__).parent / "standin"
PACKAGE = SOURCE / "sgl_kernel"


def build(out: Path) -> Entry:
    """Writes the wheel into the folder `out`."""
    described = runpy.run_path(str(PACKAGE / "distribution.py"))
    name, version = str(described["NAME"]).replace("-", "_"), str(described["VERSION"])
    info = f"{name}-{version}.dist-info"
    files = {str(p.relative_to(SOURCE)): p.read_bytes() for p in sorted(PACKAGE.glob("*.py"))}
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {described['NAME']}\nVersion: {version}\n"
        "Summary: A stand-in for SGLang's compiled kernels, for checks\n"
    ).encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: prism\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    made = out / f"{name}-{version}-py3-none-any.whl"
    write_wheel(made, files, info)
    return Entry(name=name, version=version, file=FileFacts.of(made))
