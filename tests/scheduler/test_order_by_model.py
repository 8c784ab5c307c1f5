"""An order by model gives what a walk over the whole order would give."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from prism.policies.data import AdmissionOrder, Waiting
from prism.scheduler.order_by_model import OrderByModel

KINDS = ("on", "new", "late")
ENTRIES = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(KINDS), st.sampled_from([0, 0, -3, 2]))
)


@given(
    ENTRIES, st.sets(st.integers(0, 40)), st.dictionaries(st.sampled_from("abc"), st.integers(0, 9))
)
def test_walk_is_the_order_without_who_is_blocked(
    entries: list[tuple[str, str, int]], gone: set[int], limits: dict[str, int]
) -> None:
    """Blocks each model of `limits` after so many of its requests."""
    jobs = [
        Waiting(f"{i:03}", model, 1, 1, 0.0, 0.0, priority=priority)
        for i, (model, _, priority) in enumerate(entries)
    ]
    parts = {
        kind: [job for job, (_, k, _) in zip(jobs, entries, strict=True) if k == kind]
        for kind in KINDS
    }
    waiting = {job.id: job for i, job in enumerate(jobs) if i not in gone}
    line = OrderByModel(AdmissionOrder(tuple(parts["on"]), tuple(parts["late"])), waiting)
    for job in parts["new"]:
        line.add(job.id, job.model, job.priority)
    blocked = {model for model, limit in limits.items() if limit == 0}
    seen: Counter[str] = Counter()
    walked = []
    for request_id in line.walk(limits, blocked):
        walked.append(request_id)
        model = waiting[request_id].model
        seen[model] += 1
        if seen[model] == limits[model]:
            blocked.add(model)
    left = Counter(limits)
    expected = []
    whole = [job for kind in KINDS for job in parts[kind]]
    for job in sorted(whole, key=lambda job: -job.priority):
        if job.id in waiting and left[job.model] > 0:
            left[job.model] -= 1
            expected.append(job.id)
    assert walked == expected
    late = [job.id for job in parts["late"] if job.id in waiting]
    assert line.has_late() == bool(late)
    for below in (3, 2, 0, -3):
        lower = [i for i in late if waiting[i].priority < below]
        assert line.has_late(below) == bool(lower)
    assert [i for i in waiting if line.is_late(i)] == late
    for besides in ((), late[::2]):
        heads = {waiting[i].model: i for i in reversed(late) if i not in besides}
        assert line.late_heads(besides) == sorted(heads.values(), key=late.index)
