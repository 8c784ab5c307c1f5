"""Comparison of the live system with the simulator on one trace: decisions, attainment, latency.

`journals.py` reads the live schedulers' journals, `setup.py` builds a simulation of the live
configuration, `runs.py` converts both to the same types, and the other modules compare them.
"""
