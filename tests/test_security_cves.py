"""Results of `scripts/check-cves` for pip-audit's reports."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "check-cves"
CLEAN = {"name": "good", "version": "1", "vulns": []}
BAD = {"name": "bad", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
UNKNOWN = {"name": "unknown", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("report", "code", "said"),
    [
        ([CLEAN], 0, "1 packages looked up, 0 known vulnerabilities"),
        ([CLEAN, BAD], 1, "bad 2: CVE-1, fixed in 3"),
        ([CLEAN, UNKNOWN], 3, "NOT CHECKED: unknown"),
        ([BAD, UNKNOWN], 1, "NOT CHECKED: unknown"),
        (None, 3, "NOT CHECKED: all of them"),
    ],
)
def test_what_was_not_looked_up_is_never_called_safe(
    tmp_path: Path, report: list[object] | None, code: int, said: str
) -> None:
    """Gets "No known vulnerabilities found" and exit code 0 from pip-audit if it knows no
    package."""
    program = tmp_path / "pip-audit"
    written = tmp_path / "report.json"
    written.write_text(json.dumps({"dependencies": report}) if report is not None else "")
    program.write_text(
        "#!/usr/bin/env bash\n"
        'while [[ $1 != -o ]]; do shift; done; cat "$(dirname "$0")/report.json" >"$2"\n'
        "echo No known vulnerabilities found >&2\n"
    )
    program.chmod(0o755)
    (tmp_path / "lock.txt").write_text("good==1\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = [str(SCRIPT), str(tmp_path / "lock.txt")]
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
