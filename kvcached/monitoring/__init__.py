"""State of all devices of a machine, for tools."""
