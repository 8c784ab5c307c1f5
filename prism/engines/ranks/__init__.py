"""Tensor-parallel engines: one process per rank, each on its own device.

The agent talks to rank 0 alone. Rank 0 forwards every call of the worker
(`processes/rank_leader.py`) to the other ranks (`processes/rank_follower.py`), which do the same
with the same input at the same time. The ranks communicate through `ranks/group.py` in the messages
of `ranks/orders.py`; `processes/rank_launch.py` starts them.
"""
