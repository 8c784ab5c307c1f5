"""Counts of functions in stacks that `lab.engine_check --stacks` sampled: what takes time."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

FRAME = re.compile(r'^  File "([^"]+)", line \d+ in (.+)$', re.MULTILINE)


def hottest(text: str, within: str, most: int = 30) -> dict[str, int]:
    """Returns functions by the number of samples in which they are on the stack, and "samples".

    Args:
        within: function whose samples are counted, as a frame names it.
    """
    counts: Counter[str] = Counter()
    samples = 0
    for stack in text.split("(most recent call first):")[1:]:
        frames = [f"{short(file)}:{function}" for file, function in FRAME.findall(stack)]
        names = [frame.rpartition(":")[2] for frame in frames]
        if within not in names:
            continue
        samples += 1
        counts.update(set(frames[: names.index(within)]))
    return {"samples": samples, **dict(counts.most_common(most))}


def short(file: str) -> str:
    """Returns the end of a path: its folder and its name."""
    return "/".join(Path(file).parts[-2:])
