"""Checks of names, machines, models and memory in a configuration."""
