"""A process that stands where grammars are tried: what it does is the grammar's text."""

from __future__ import annotations

import json
import os
import sys
import time

for tried, line in enumerate(sys.stdin, 1):
    text = json.loads(line)["text"]
    if text == "slow":
        time.sleep(600)
    # Beside another grammar than the one that every process begins with.
    if text == "dies" or (text == "dies late" and tried > 2):
        os._exit(1)
    named = os.environ.get("PRISM_PARENT_PID") == str(os.getppid())
    errors = {"wrong": "it is wrong", "orphan": "" if named else "nobody"}
    print(json.dumps({"error": errors.get(text, "")}), flush=True)
