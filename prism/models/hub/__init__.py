"""Models by a hub's name."""
