"""Another process, in which no test has corrected SGLang."""

from __future__ import annotations

import subprocess
import sys

from tests.acceptance.harness import ROOT

_CODE = """
from prism.engines.sglang.platform import stubs
stubs.install()
import {module}
{module}.{function}(*{arguments})
"""


def printed(module: str, function: str, *arguments: int) -> list[str]:
    """Returns the lines that a function of a module of tests prints."""
    code = _CODE.format(module=module, function=function, arguments=arguments)
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()
