"""The command line of `scripts/gpu-wheels`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from scripts.gpu_wheels import fetch, manifest, own, standin_wheel
from scripts.gpu_wheels.manifest import Entry, FileFacts, TooLarge
from scripts.gpu_wheels.strip import strip

ROOT = Path(__file__).parent.parent.parent
OUT = Path("build/gpu-wheels")
LIMIT_BYTES = 45 << 20  # the checkout and the wheels together


class NotOurs(RuntimeError):
    """Error for a folder of wheels that holds other files."""


def main(arguments: list[str] | None = None) -> int:
    """Collects the wheels. Returns the exit code, 1 after one line that says what failed."""
    parser = argparse.ArgumentParser(prog="scripts/gpu-wheels", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / OUT, metavar="FOLDER")
    parser.add_argument("--python", default="3.12", metavar="VERSION")
    parser.add_argument("--limit", type=int, default=LIMIT_BYTES, metavar="BYTES")
    options = parser.parse_args(arguments)
    try:
        entries = collect(options.out, options.python)
        made = manifest.write(options.out, entries, options.python, ROOT, options.limit)
    except (fetch.CannotFetch, own.CannotBuild, NotOurs, TooLarge) as error:
        print(f"gpu-wheels: {error}", file=sys.stderr)
        return 1
    print(manifest.describe(made))
    return 0


def collect(out: Path, python: str) -> list[Entry]:
    """Fills a folder with the wheels, after removing those of an earlier run."""
    pins = fetch.read_pins(ROOT / "requirements" / "gpu-box.txt")
    clear(out)
    with tempfile.TemporaryDirectory(prefix="gpu-wheels-") as folder:
        wheels = fetch.download(pins, python, Path(folder))
        entries = [strip(wheel, out) for wheel in wheels]
    kernels = [path for path in (out / manifest.COMPILED,) if path.exists()]
    carried = [Entry("kernels", "", FileFacts.of(path)) for path in kernels]
    return [*entries, standin_wheel.build(out), *own.build(out, python, ROOT), *carried]


def clear(out: Path) -> None:
    """Makes the folder, and removes wheels of an earlier run. Raises NotOurs for other files."""
    out.mkdir(parents=True, exist_ok=True)
    ours = {*out.glob("*.whl"), *out.glob(manifest.NAME)}
    kept = out / manifest.COMPILED
    if others := sorted(path.name for path in out.iterdir() if path not in {*ours, kept}):
        raise NotOurs(f"{out} holds {others[0]} and is not a folder of wheels; name another")
    for path in ours:
        path.unlink()


if __name__ == "__main__":
    sys.exit(main())
