"""State of the device, its engines and its requests."""
