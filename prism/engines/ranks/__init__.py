"""One engine over several devices: its tensor-parallel ranks, each a process on its own device.

Rank 0 is the engine that the agent knows. It decides: `leader.py` passes every call of the worker
on to the others (`follower.py`), which do the same with the same input at the same time, and
`group.py` is what they agree through. `spread.py` forks them.
"""
