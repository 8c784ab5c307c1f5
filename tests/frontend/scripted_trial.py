"""Stand-in for the process that tries grammars: a grammar's text selects the behaviour."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

for tried, line in enumerate(sys.stdin, 1):
    asked = json.loads(line)
    text = asked["text"]
    if text.startswith("slow"):
        signal.setitimer(signal.ITIMER_REAL, asked["cpu_s_max"])
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGPROF))
        time.sleep(600)
    # "dies late": after another grammar in addition to the one that every process begins with.
    if text == "dies" or (text == "dies late" and tried > 2):
        os._exit(1)
    named = os.environ.get("PRISM_PARENT_PID") == str(os.getppid())
    errors = {"wrong": "it is wrong", "orphan": "" if named else "nobody"}
    print(json.dumps({"error": errors.get(text, ""), "cpu_s": 0.1}), flush=True)
