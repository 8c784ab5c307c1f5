"""A simulated cluster behind the ports that the live schedulers run on."""
