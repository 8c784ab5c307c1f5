"""Moves of running requests' KV from one engine to another."""
