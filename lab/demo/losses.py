"""Losses of each way of sharing, in a sentence."""

from __future__ import annotations

from collections import Counter

from lab.demo import misses
from prism_replay.results import ReplayResults


def sentence(subject: str, results: ReplayResults) -> str:
    """Returns a sentence such as "Fixed shares served 3 of 4 models, answered none of the 4
    requests of smollm2-135m, and missed the SLO of no other request."

    Args:
        subject: Name of the way of sharing.
    """
    models = results.summary.models
    refused = {name: group.requests for name, group in models.items() if not group.completed}
    count = len(models) - len(refused)
    whole = f"all {count} models" if count > 1 else "the only model"
    parts = [f"{subject} served {f'{count} of {len(models)} models' if refused else whole}"]
    parts += [f"answered {_none_of(n)} of {name}" for name, n in refused.items()]
    parts.append(_missed(results, set(refused)))
    return f"{', '.join(parts[:-1])}, and {parts[-1]}."


def counted(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"


def _none_of(count: int) -> str:
    return f"none of the {counted(count)}" if count > 1 else "not the only request"


def _missed(results: ReplayResults, refused: set[str]) -> str:
    """Returns text on the missed requests of the models that were served."""
    reasons: Counter[str] = Counter()
    for name, found in misses.reasons(results).items():
        if name not in refused:
            reasons.update(found)
    other = "other " if refused else ""
    total = reasons.total()
    if not total:
        return f"missed the SLO of no {other}request"
    text = counted(total).replace(" ", f" {other}")
    if len(+reasons) > 1:
        return f"missed the SLO of {text}: {misses.in_words(reasons)}"
    (reason,) = reasons
    return f"missed the SLO of {text}, which {misses.REASONS[reason]}"
