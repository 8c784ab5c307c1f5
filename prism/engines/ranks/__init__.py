"""Tensor-parallel engines: one process per rank, each on its own device.

The agent talks to rank 0 alone. Rank 0 forwards every call of the worker (`leader.py`) to the other
ranks (`follower.py`), which do the same with the same input at the same time. The ranks communicate
through `group.py`; `launch.py` starts them.
"""
