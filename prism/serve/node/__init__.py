"""Node of a cluster: checks of the machine, run directory, MPS and registration."""
