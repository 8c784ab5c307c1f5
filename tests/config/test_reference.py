"""The references of both YAMLs match their classes, and every field has a note."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from prism.config.schema.cluster_config import ServeYaml
from prism_sim.scenario.config import SimYaml

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "config_reference.py"


def test_the_reference_is_current() -> None:
    """Fails if it is stale: run python scripts/config_reference.py and commit its output."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_every_section_has_a_table() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    simulated = (ROOT / "docs" / "prism-sim-configuration.md").read_text()
    for struct, text in ((ServeYaml, page), (SimYaml, simulated)):
        for field in msgspec.structs.fields(struct):
            assert f"| `{field.encode_name}` |" in text
    for heading in ("devices[]", "models[].slo", "scheduler"):
        assert f"## `{heading}`" in page


def test_a_field_without_a_note_is_refused() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import config_reference as made, prism.config.schema.machines as machines\n"
        "made.notes = lambda struct: {}\n"
        "list(made.section(machines.DeviceYaml, 'devices[]'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "devices[].name does not have a comment above its field" in done.stderr
