"""docs/api is what the docstrings say, and every public name has one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import kvcached

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "api_reference.py"


def test_the_reference_is_current() -> None:
    """If not: python scripts/api_reference.py, and commit what it writes."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_every_public_name_has_its_place() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    documented = set(re.findall(r"^## (\w+)$", pages, re.MULTILINE))
    # The rest are a module and aliases of types.
    named = {name for name in kvcached.__all__ if hasattr(getattr(kvcached, name), "__qualname__")}
    assert len(named) > 40
    assert named - {"ShrinkPolicy"} <= documented


def test_an_undocumented_name_is_refused() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import api_reference, kvcached\n"
        "kvcached.KVCache.trim.__doc__ = None\n"
        "api_reference.page_text('kvcache')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "trim does not have a docstring" in done.stderr
