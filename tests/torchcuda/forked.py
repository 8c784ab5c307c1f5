"""Runs functions in separate processes, forked from this one, which has only imported torch."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

Rule = Callable[[], None]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    RULES[function.__name__] = function
    return function


def run_all(module: str) -> dict[str, Any]:
    importlib.import_module(module)
    return {name: _run(function) for name, function in RULES.items()}


def _run(function: Rule) -> dict[str, Any]:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            _be_child(function)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        said = output.read().decode(errors="replace")
    return {"status": os.waitstatus_to_exitcode(status), "said": said}


def _be_child(function: Rule) -> None:
    status = 1
    try:
        function()
        status = 0
    except BaseException:  # noqa: BLE001 (it is printed, and the status shows it)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main(module: str) -> None:
    """Prints a JSON object: each rule's exit status (or minus a signal) and output."""
    print(json.dumps(run_all(module)))
