"""Differences of devices, and what must happen before sglang is imported."""
