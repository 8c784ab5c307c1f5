"""One trace through the live system and through the simulator: decisions one by one, attainment and
latency. `journals.py` reads what the live schedulers wrote, `setup.py` makes a simulation of the
live configuration, `runs.py` brings both into the same terms, the other modules compare."""
